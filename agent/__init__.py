"""What runs on the instance: it heals the volume, runs the trainer and ends the fleet. Start reading at `run`."""

__version__ = "0.1.0"
