"""Programs that the agent starts: their group, user, sandbox (system calls), environment and output."""
