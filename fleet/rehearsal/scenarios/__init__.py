"""Rehearsals: what each does to a job, how it is watched, and the verdict."""
