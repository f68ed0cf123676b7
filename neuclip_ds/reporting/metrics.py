"""Metrics of a run: one JSON object per line in metrics.jsonl, the same in TensorBoard and other sinks.

Only rank 0 writes them; the other ranks have None:

    with MetricsLog(folder, resume_step) if rank == 0 else nullcontext() as metrics:
        ...
        if metrics is not None:
            metrics.write(step, {"loss": loss})
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch.utils.tensorboard import SummaryWriter

from neuclip_ds.data.disk import best_effort
from neuclip_ds.reporting.step_lines import drop_from, step_records


class MetricSink(Protocol):
    """Destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """Finish writing; `failed` tells whether the run ended with an exception."""


class MetricsLog:
    """Writer of FOLDER/metrics.jsonl, FOLDER/tensorboard/ and other sinks.

    The first two have reached the operating system once `write` returns, so a killed run loses at most the line it was
    writing. Resuming at step s drops all later lines: the resumed run writes those of an uninterrupted one.

    Args:
        folder: the run's folder, created if absent.
        resume_step: the last step to keep, that of the loaded checkpoint; None starts empty files.
        other_sinks: closed with this one.
    """

    def __init__(self, folder: Path, resume_step: int | None = None, other_sinks: Sequence[MetricSink] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        first_new_step = 0 if resume_step is None else resume_step + 1
        lines = _JsonLines(folder / "metrics.jsonl", first_new_step)
        self._sinks: list[MetricSink] = [lines, _TensorBoard(folder / "tensorboard", first_new_step), *other_sinks]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics to all sinks; in metrics.jsonl NaN and infinities become "nan", "inf" and "-inf"."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for sink in self._sinks:
            sink.close(failed=kind is not None)


class _JsonLines:
    """Sink that writes metrics.jsonl."""

    def __init__(self, path: Path, first_new_step: int) -> None:
        if path.exists():
            drop_from(path, first_new_step)
        self._path = path
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step} | {name: _json_number(value) for name, value in metrics.items()}
        with best_effort(self._path):  # what is left in its buffer is written with the next line
            self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def close(self, failed: bool) -> None:
        with best_effort(self._path):
            self._file.close()


class _TensorBoard:
    """Sink that writes TensorBoard scalars; earlier points from `first_new_step` on are hidden."""

    def __init__(self, folder: Path, first_new_step: int) -> None:
        self._folder = folder
        self._writer = SummaryWriter(str(folder), purge_step=first_new_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with best_effort(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self, failed: bool) -> None:
        with best_effort(self._folder):
            self._writer.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """Yield the records of a metrics.jsonl, with NaN and infinities restored and without a partial last line."""
    for _, record in step_records(path):
        yield {name: float(value) if isinstance(value, str) else value for name, value in record.items()}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))
