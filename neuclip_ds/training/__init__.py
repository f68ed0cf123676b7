"""The run: engine, step, schedules, checkpoints. The only room that knows DeepSpeed."""
