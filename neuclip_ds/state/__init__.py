"""State whose rows are partitioned over ranks (per-sample statistics, NPN prototypes), and the files that store it."""
