"""One machine's life from boot to end: the order of its stages."""
