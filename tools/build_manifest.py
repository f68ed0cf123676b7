"""Script for `neuclip-ds build-manifest`; see `--help` for examples."""

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(command="build-manifest")
