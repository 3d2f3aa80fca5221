"""The checkpoint file: format, two slots, checksums, what a power cut leaves."""
