"""The other services on this machine: IAM, S3, EFS, schedules, metadata."""
