"""`neuclip-ds export` as a file.

Example: python tools/export.py runs/vitb32_tuneclip --format transformers --out exported/vitb32_tuneclip
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
