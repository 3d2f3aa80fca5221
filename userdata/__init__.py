"""The user data: a fixed POSIX shell stub, the bootstrap it carries, the systemd unit."""
