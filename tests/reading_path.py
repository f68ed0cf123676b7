"""Given the demo's shards, print the package's files that run in a training step, including data loading."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import FrameType

import neuclip_ds
from neuclip_ds import api
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.loop import Loop, StepResult

PACKAGE = Path(neuclip_ds.__file__).parent


class RecordFiles(Hook):
    """Hook that records the files whose functions are called between the end of step 2 and the end of step 3."""

    def __init__(self) -> None:
        self.found: set[Path] = set()

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.step == 2:
            sys.setprofile(self._called)
        elif result.step == 3:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.found.add(path.relative_to(PACKAGE))


def files_of_a_step(shards: str) -> dict[str, int]:
    """Return the number of lines of each file that runs; with workers=0, batches are loaded in this process."""
    record = RecordFiles()
    with tempfile.TemporaryDirectory() as folder:
        data = {"train": shards, "val": "", "zero_shot": "", "workers": 0}
        api.train("demo", hooks=[record], data=data, max_steps=4, run={"name": "run", "output_dir": folder})
    return {str(path): len((PACKAGE / path).read_text().splitlines()) for path in sorted(record.found)}


if __name__ == "__main__":
    logging.disable(logging.INFO)  # a progress line, logged every ten seconds, could fall within the recorded step
    lines = files_of_a_step(sys.argv[1])
    print(*(f"{count:5} {path}" for path, count in lines.items()), sep="\n")
    print(json.dumps({"files": len(lines), "lines": sum(lines.values())}))
