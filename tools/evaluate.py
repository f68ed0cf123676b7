"""`neuclip-ds evaluate` as a file.

Example: deepspeed tools/evaluate.py runs/cc3m_neuclip --data /data/evalsets
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
