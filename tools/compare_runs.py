"""`neuclip-ds compare` as a file.

Example: python tools/compare_runs.py runs/dfn14m_neuclip runs/dfn14m_openclip --out runs/comparison
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["compare", *sys.argv[1:]])
