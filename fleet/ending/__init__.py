"""How a run is ended and cleared away: cancel, stop, clean."""
