"""Sweeps: a list of parameters, each entry of which is a run of its own on one fleet."""
