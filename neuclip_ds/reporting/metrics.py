"""Metrics of a run, written by rank 0 to metrics.jsonl (one JSON object per line) and to TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.errors import UserError
from neuclip_ds.files import best_effort, records
from neuclip_ds.losses.options import PREFIX

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

AVERAGED = "ema/"  # prefix of metrics of the averaged weights
CHANCE = "chance/"  # prefix of the chance level of a score
NORMALIZER = "normalizer_"  # prefix of the results of comparing normalizers
_SCORE_PREFIXES = (  # in display order
    "average/",
    "zero_shot_top",
    "image_to_text_recall@",
    "text_to_image_recall@",
    "task/",
)

_OF_MODEL = re.compile(f"^({AVERAGED})?({PREFIX}[0-9]+/)?")

Series = tuple[list[int], list[float]]
"""Steps and values of a metric."""


def percent(score: float | None) -> str:
    """Return a score in percent with two decimals, or "-" if it is not known."""
    return "-" if score is None else f"{100 * score:.2f}"


class MetricsLog:
    """Writer of FOLDER/metrics.jsonl and FOLDER/tensorboard/.

    `write` hands a line to the operating system before it returns, so a killed run loses at most the line that it was
    writing. Steps after `resume_step` are dropped, because the resumed run writes them again; None drops all steps.
    The constructor raises OSError if the files cannot be created; a failure of `write` is only logged.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        first_new_step = 0 if resume_step is None else resume_step + 1
        self._path = folder / "metrics.jsonl"
        self._board_path = folder / "tensorboard"
        if self._path.exists():
            drop_from(self._path, first_new_step)
        self._lines = self._path.open("a", encoding="utf-8", newline="\n", buffering=1)
        self._board_path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=self._board_path) as file:  # a full disk fails here, not in a thread
            file.write(bytes(4096))
        self._first_new_step = first_new_step
        # created by the first `write`: it must not precede wandb.init, which a hook calls when it starts
        self._board: SummaryWriter | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics; in metrics.jsonl, NaN and infinities become "nan", "inf" and "-inf"."""
        record: dict[str, float | str] = {"step": step}
        for name, value in metrics.items():
            record[name] = value if math.isfinite(value) else str(float(value))
        with best_effort(self._path):  # if it fails, the next line writes the rest of the buffer
            self._lines.write(json.dumps(record, allow_nan=False) + "\n")
        with best_effort(self._board_path):
            if self._board is None:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                # hides the points of later steps that a run wrote before it resumed
                self._board = SummaryWriter(str(self._board_path), purge_step=self._first_new_step)
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        with best_effort(self._path):
            self._lines.close()
        with best_effort(self._board_path):
            if self._board is not None:
                self._board.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """Yield the records of a metrics.jsonl file, restoring NaN and infinities.

    Damaged lines, a partial last line and values that are not numbers are omitted.
    """
    for _, record in records(path, "step"):
        numbers: dict[str, float] = {}
        for name, value in record.items():
            if isinstance(value, int | float):
                numbers[name] = value
            elif isinstance(value, str):
                with suppress(ValueError):
                    numbers[name] = float(value)
        yield numbers


def read_series(run: Path) -> dict[str, Series]:
    """Read the steps and values of each metric of a run; raise `UserError` if there is no metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run} contains no metrics.jsonl; pass the folder of a run.")
    series: dict[str, Series] = {}
    for record in read_metrics(path):
        for name, value in record.items():
            if name != "step":
                steps, values = series.setdefault(name, ([], []))
                steps.append(int(record["step"]))
                values.append(value)
    return series


def scores_among(names: Iterable[str]) -> list[str]:
    """Return the names of the metrics that are scores, such as accuracies and recalls: averages first, tasks last."""
    distinct_names = list(dict.fromkeys(names))
    scores: list[str] = []
    for prefix in _SCORE_PREFIXES:
        scores += [name for name in distinct_names if name_of_full_model(name).startswith(prefix)]
    return scores


def name_of_full_model(name: str) -> str:
    """Return a metric's name without `ema/` (of the averaged weights) and `prefixP/` (of a prefix of the embedding)."""
    return _OF_MODEL.sub("", name)


def score_lines(results: Mapping[str, float]) -> Iterator[str]:
    """Yield a log line for each result of an evaluation, with the chance level if it is known."""
    for name, value in results.items():
        if name.startswith(CHANCE):
            continue
        line = f"{name}: {value:.4g}"
        chance = results.get(CHANCE + name.removeprefix(AVERAGED))
        if chance is not None:
            line += f" (chance {chance:.3g})"
        yield line


def drop_from(path: Path, first_step: int) -> None:
    """Drop the records with step >= first_step, and all damaged lines, replacing the file atomically."""
    partial = path.with_suffix(".jsonl.partial")
    with partial.open("w", encoding="utf-8", newline="\n") as kept:
        kept.writelines(line for line, record in records(path, "step") if record["step"] < first_step)
        kept.flush()
        os.fsync(kept.fileno())
    partial.replace(path)
