"""Training runs: their set-up, the loop and its steps, hooks, records, and the recovery of statistics."""
