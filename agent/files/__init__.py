"""Where the agent keeps its files, and files that a trainer may have made: no link is followed."""
