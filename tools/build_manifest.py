"""`neuclip-ds build-manifest` as a file.

Example: mpirun -n 64 python tools/build_manifest.py manifests/pool /pool/*.tar
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["build-manifest", *sys.argv[1:]])
