"""Stand-in for the `wandb` module that records its calls in the file named by WANDB_CALLS."""

import json
import os
from pathlib import Path
from typing import Any


def _note(call: str, **values: Any) -> None:
    with Path(os.environ["WANDB_CALLS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, **values}) + "\n")


class Run:
    def finish(self, exit_code: int) -> None:
        if os.environ.get("WANDB_BREAKS"):
            raise OSError("the network is gone")
        _note("finish", exit_code=exit_code)


def init(**options: Any) -> Run:
    import torch.utils.tensorboard.writer as tensorboard  # wandb patches this, so init must precede any writer

    folder = Path(options["dir"], "tensorboard")
    _note("init", before_tensorboard=tensorboard is not None and not list(folder.glob("*")), **options)
    return Run()
