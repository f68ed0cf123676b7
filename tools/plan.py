"""`neuclip-ds plan` as a file.

Example: python tools/plan.py scale dfn192m_neuclip --nodes 1 8 64 --rows 640
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
