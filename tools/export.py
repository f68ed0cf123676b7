"""Script for `neuclip-ds export`; see `--help` for examples."""

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(command="export")
