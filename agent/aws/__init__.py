"""AWS as the agent calls it: clients, EC2, S3, the metadata service."""
