"""A run on several machines at once: who is there, who leads, and where their ranks meet."""
