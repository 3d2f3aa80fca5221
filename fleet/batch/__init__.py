"""AWS Batch: environments, queue and job definition of a job; submitting it, following it, taking it all away."""
