"""Programs: one module a command, and `main`, which runs the command that is named."""
