"""Logs of a run: followed on its machine, or read from the store."""
