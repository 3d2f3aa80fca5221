"""A run in a container of AWS Batch: the same contract with the trainer, without a volume and without healing."""
