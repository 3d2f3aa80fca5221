"""What runs on the instance: finds itself, heals the volume, runs the trainer, ends the fleet. Start reading at `run`."""

__version__ = "0.1.0"
