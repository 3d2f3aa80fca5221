"""From the operator's files to a fleet: gather, plan, submit."""
