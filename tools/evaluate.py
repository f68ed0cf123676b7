"""`neuclip-ds evaluate` as a file; `--help` has examples."""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
