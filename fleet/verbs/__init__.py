"""One module a verb of fleetctl: its options, and what it prints. The work is done elsewhere in `spotheal.fleet`."""
