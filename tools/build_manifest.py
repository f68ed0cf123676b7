"""`neuclip-ds build-manifest` as a file; `--help` has examples."""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["build-manifest", *sys.argv[1:]])
