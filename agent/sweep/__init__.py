"""A sweep on a fleet: many runs, one queue in the store, and every instance of the fleet a worker of it."""
