"""The IAM policies of the instance, of the fleet and of the operator."""
