import os
import sys
from pathlib import Path

import torch

for folder in (
    ".",
    "objectives",
    "data",
    "models/pretrained",
    "evaluation",
):  # tests share helpers such as `ranks` and `oracle`
    sys.path.insert(0, str(Path(__file__).parent / folder))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)
