"""Reports of a run: the log, metrics, events and HTML report."""
