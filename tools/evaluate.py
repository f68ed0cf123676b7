"""Script for `neuclip-ds evaluate`; see `--help` for examples."""

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(command="evaluate")
