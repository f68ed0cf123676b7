"""Tools of this project called as a user calls them, with a model that trains in no time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.data.demo import make_demo_data
from neuclip_ds.objectives import METHODS

ROOT = Path(__file__).parents[1]
SMALL = [  # and without a report, whose plots take longer than the training
    "--run.report=false",
    "--model.vision.image_size=16",
    '--model.vision.options={"patch_size":8,"embed_dim":16,"depth":1,"num_heads":2}',
    "--model.text.width=16",
    "--model.text.layers=1",
    "--model.text.heads=2",
    "--model.text.vocab_size=300",
    "--model.embed_dim=16",
]
_TINY = [
    "demo",
    *SMALL,
    "--objective.method=fastclip_v3",
    "--data.batch_size=8",
    "--data.workers=0",
    "--run.sample_log=true",
    "--data.val=",
    "--data.zero_shot=",
]


def read_options(options: Sequence[str]) -> list[str]:
    """The options of a demo run without those that its method does not read."""
    chosen = [option.partition("=")[2] for option in options if option.startswith("--objective.method=")]
    method = METHODS[chosen[-1] if chosen else "neuclip"]
    return [option for option in options if method.reads(option.removeprefix("--"))]


def environment() -> dict[str, str]:
    """Of a process that no launcher has started."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def call(
    tool: str, *options: str, folder: Path | None = None, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A tool by its path in the repository, in a working folder, on its own or as so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(ROOT / tool), *options]
    return subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=240)


def demo_shards(folder: Path, pairs: int, held_out: int = 40) -> Path:
    """The training shards of a small demo set, its other splits beside them."""
    make_demo_data(folder, pairs=pairs, held_out=held_out, zero_shot=80, size=32, processes=1)
    return folder / "train"


def train(
    runs: Path, data: str, steps: int, *options: str, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """train.py, for some steps of a run named `run` in the folder `runs`."""
    where = [f"--run.folder={runs}", "--run.name=run", f"--data.train={data}", f"--budget.steps={steps}"]
    return call("train.py", *_TINY, *where, *options, ranks=ranks)


def newest_checkpoint(runs: Path) -> Path:
    return max((runs / "run" / "checkpoints").glob("step_*"))
