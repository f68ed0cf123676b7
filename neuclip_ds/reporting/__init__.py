"""What a run tells its user: the log, the progress line, the metrics and trouble in words."""
