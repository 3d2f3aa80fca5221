"""What the trainer may import: crash-safe checkpoints, exact resume, the notice. Needs torch; nothing of AWS."""
