"""`neuclip-ds plan` as a file; `--help` has examples."""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
