"""The IAM policies of the instance, of the fleet and of the operator, made from one table of calls."""
