"""Checkpoints of several ranks, each of which writes its part."""
