"""`neuclip-ds make-demo-data` as a file.

Example: python tools/make_demo_data.py /tmp/demo --pairs 5000
"""

import sys

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(["make-demo-data", *sys.argv[1:]])
