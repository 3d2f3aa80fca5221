"""The local cloud: a faithful EC2, S3 and IMDS on this machine, where a job is rehearsed before it costs money."""
