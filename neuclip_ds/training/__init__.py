"""A training run: loop, step, hooks, data order, recovery."""
