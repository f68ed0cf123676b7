"""The command line: one module per command, and `main`, which runs a command by name."""
