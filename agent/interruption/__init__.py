"""The notice of an interruption, and the handover of the volume that answers it."""
