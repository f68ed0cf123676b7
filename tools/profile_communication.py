"""`neuclip-ds profile` as a file.

Example: python tools/profile_communication.py --methods openclip neuclip --recipe miniature --out runs/profile
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["profile", *sys.argv[1:]])
