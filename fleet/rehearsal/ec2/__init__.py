"""EC2 on this machine: the rule book, the spot market, faults."""
