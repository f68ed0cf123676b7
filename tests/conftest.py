import os
import sys
from pathlib import Path

# before torch, DeepSpeed and others are imported, which read them then; processes that tests start inherit them
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["DS_ACCELERATOR"] = "cpu"  # also on a machine with GPUs
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the network

HERE = Path(__file__).parent
# tests share helpers such as `ranks` and `oracle`
sys.path[:0] = [str(HERE / folder) for folder in ("evaluation", "models/pretrained", "data", "objectives", ".")]

import torch  # noqa: E402

torch.set_num_threads(1)
