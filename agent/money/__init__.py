"""What the run costs, its limits, and the messages to people."""
