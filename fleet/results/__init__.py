"""Results of a run, fetched from S3 and EFS."""
