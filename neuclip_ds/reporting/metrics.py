"""The numbers of a run: one JSON object a line in metrics.jsonl, the same in TensorBoard and where else is asked for.

Rank 0 alone keeps them; the other ranks hold None:

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
from types import TracebackType
from typing import Protocol

from neuclip_ds.reporting.step_lines import drop_from, step_records
from neuclip_ds.reporting.tensorboard import TensorBoard


class MetricSink(Protocol):
    """A place where metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """`failed`: the run has ended by an exception."""


class MetricsLog:
    """Appends metrics to FOLDER/metrics.jsonl, FOLDER/tensorboard/ and further sinks.

    The first two have reached the operating system once `write` returns, so a killed run loses at most the line it was
    writing. Resuming at step s drops what lies beyond it: the resumed run writes the lines that an uninterrupted
    one would have written.
    """

    def __init__(self, folder: Path, resume_step: int | None = None, further: Sequence[MetricSink] = ()) -> None:
        """
        Args:
            folder: the run's folder, created if need be.
            resume_step: the last step to keep, that of the loaded checkpoint; None starts all records afresh.
            further: other sinks, which are closed with this.
        """
        folder.mkdir(parents=True, exist_ok=True)
        first_new_step = 0 if resume_step is None else resume_step + 1
        lines = _JsonLines(folder / "metrics.jsonl", first_new_step)
        self._sinks: list[MetricSink] = [lines, TensorBoard(folder / "tensorboard", first_new_step), *further]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a step's metrics everywhere; in metrics.jsonl NaN and infinities become "nan", "inf" and "-inf"."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close(failed=kind is not None)


class _JsonLines:
    """The file metrics.jsonl."""

    def __init__(self, path: Path, first_new_step: int) -> None:
        if path.exists():
            drop_from(path, first_new_step)
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step} | {name: _json_number(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")

    def close(self, failed: bool) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """The records of a metrics.jsonl in order, non-finite numbers restored, a half-written last line left out."""
    for _, record in step_records(path):
        yield {name: float(value) if isinstance(value, str) else value for name, value in record.items()}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))
