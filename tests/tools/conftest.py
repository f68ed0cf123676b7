import sys

from small_runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))  # as for the programs there
