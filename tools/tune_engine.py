"""`neuclip-ds tune-deepspeed` as a file.

Example: python tools/tune_engine.py --engine zero2_bf16 --recipe miniature --rows 16 --write mine.json
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["tune-deepspeed", *sys.argv[1:]])
