"""State partitioned over ranks by rows: per-sample statistics, NPN columns, and their files."""
