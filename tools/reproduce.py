"""`neuclip-ds reproduce` as a file.

Example: python tools/reproduce.py methods demo:train --out runs/reproduction
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["reproduce", *sys.argv[1:]])
