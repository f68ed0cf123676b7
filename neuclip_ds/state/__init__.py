"""State whose rows are partitioned over ranks (per-sample statistics, NPN columns), and its files."""
