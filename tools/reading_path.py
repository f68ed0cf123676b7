"""For developers of neuclip_ds: list the package's files that one training step executes, with their line counts.

A step is recorded from the end of the previous step to its own end, with loaders in this process. The list therefore
also contains the files that load the next batch, run hooks, and write metrics and checkpoints. The last line counts
only the other files, whose code runs between the batch on the device and the updated weights. With two ranks, the list
is for rank 0.

`--data` can be any training data; `train.py demo` renders demo data in .cache/demo.

Example:
  python tools/reading_path.py --data .cache/demo/train --method fastclip_v3 --ranks 2
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from types import FrameType

from benchmarking import on_ranks

import neuclip_ds
from neuclip_ds import api
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.trainer import Loop, StepResult

PACKAGE = Path(neuclip_ds.__file__).parent
# packages and modules that load data, run hooks, and write records and checkpoints
AROUND_THE_STEP = (
    Path("data"),
    Path("models/tokenizer"),
    Path("training/hooks"),
    Path("training/records"),
    Path("training/checkpointing"),
    Path("reporting"),
    Path("checkpoint"),
)
RECORDED_STEP = 3  # by then, everything that is built in the first steps exists


class RecordFiles(Hook):
    """Hook that records the package's files whose functions are called in one step."""

    def __init__(self) -> None:
        self.paths: set[Path] = set()

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.step == RECORDED_STEP - 1:
            sys.setprofile(self._record_call)
        elif result.step == RECORDED_STEP:
            sys.setprofile(None)

    def _record_call(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.paths.add(path.relative_to(PACKAGE))


def files_of_a_step(shards: str, method: str, folder: str) -> list[str]:
    """Train for a few steps; return the files that one step executes on this rank, relative to the package."""
    logging.disable(logging.INFO)  # a progress line, which is logged every ten seconds, could fall within the step
    record = RecordFiles()
    api.train(
        "demo",
        hooks=[record],
        data={"train": shards, "val": "", "zero_shot": "", "workers": 0},
        objective={"method": method},
        max_steps=RECORDED_STEP + 1,
        run={"name": "run", "output_dir": folder},
    )
    return sorted(map(str, record.paths))


def is_around_the_step(path: Path) -> bool:
    """Return whether a file belongs to a package or module in `AROUND_THE_STEP`."""
    module = path.with_suffix("")
    return any(module.is_relative_to(excluded) for excluded in AROUND_THE_STEP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder or pattern of training shards")
    parser.add_argument("--method", default="openclip", help="method to train with (default: openclip)")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1, help="number of processes (default: 1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_ranks(options.ranks, files_of_a_step, options.data, options.method, folder)
    line_counts: dict[Path, int] = {}
    for name in by_rank[0]:
        line_counts[Path(name)] = len((PACKAGE / name).read_text(encoding="utf-8").splitlines())
    for path, count in line_counts.items():
        print(f"{count:6,} {path}")
    in_the_step = [count for path, count in line_counts.items() if not is_around_the_step(path)]
    print(f"total: {len(line_counts)} files, {sum(line_counts.values()):,} lines")
    print(f"without data, hooks, records and checkpoints: {len(in_the_step)} files, {sum(in_the_step):,} lines")


if __name__ == "__main__":
    main()
