"""AWS Batch on this machine."""
