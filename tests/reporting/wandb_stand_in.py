"""Stand-in for the module wandb, which records its calls in the file WANDB_CALLS."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SOURCE = Path(__file__)


def _note(call: str, **values: Any) -> None:
    with Path(os.environ["WANDB_CALLS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, **values}) + "\n")


class Run:
    def log(self, values: dict[str, float]) -> None:
        if os.environ.get("WANDB_BREAKS"):
            raise OSError("the network is gone")
        _note("log", **values)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        _note("define_metric", name=name, step_metric=step_metric)

    def finish(self, exit_code: int) -> None:
        _note("finish", exit_code=exit_code)


def init(**options: Any) -> Run:
    _note("init", **options)
    return Run()
