"""The trainer's attempts: setup, start, watch, hang, restart, torn saves."""
