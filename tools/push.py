"""`neuclip-ds push` as a file; `--help` has examples."""

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(command="push")
