"""What a run does now, what it waits for, and what it has cost."""
