"""Reports of a run: log, progress line, metrics, warnings, HTML report."""
