"""What a run tells its user: the log, the progress line, and metrics.jsonl with its TensorBoard twin."""
