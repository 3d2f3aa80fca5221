"""Instances as processes of this machine, with their volumes and sshd."""
