"""Volumes that the operator makes and fills before a run."""
