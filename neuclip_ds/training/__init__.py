"""Training runs: the loop and its steps, hooks, the order of the samples, and the recovery of statistics."""
