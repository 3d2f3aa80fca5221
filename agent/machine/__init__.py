"""The machine: devices, mounts, EFS, systemd."""
