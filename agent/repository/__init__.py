"""The training repository: git, and the working copy on the volume."""
