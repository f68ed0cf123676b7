"""`neuclip-ds make-demo-data` as a file; `--help` has examples."""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["make-demo-data", *sys.argv[1:]])
