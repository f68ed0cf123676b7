"""`neuclip-ds nearest-captions` as a file.

Example: python tools/nearest_captions.py runs/vitb32_tuneclip --set /data/evalsets/wds_flickr30k --out nearest.html
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["nearest-captions", *sys.argv[1:]])
