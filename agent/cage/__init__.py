"""What the trainer may reach: its user, its network, its credentials."""
