"""The numbers of a run, one JSON object a line in metrics.jsonl, and the same points in TensorBoard.

Rank 0 alone keeps one; the other ranks hold None:

    with MetricsLog(folder, resume_step) if rank == 0 else nullcontext() as metrics:
        ...
        if metrics is not None:
            metrics.write(step, {"loss": loss})
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from neuclip_ds.reporting.step_lines import drop_from, step_records


class MetricsLog:
    """Appends metrics to FOLDER/metrics.jsonl and FOLDER/tensorboard/.

    Both have reached the operating system once `write` returns, so a killed run loses at most the line it was
    writing. Resuming at step s drops what lies beyond it: the resumed run writes the lines that an uninterrupted
    one would have written.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        """
        Args:
            folder: the run's folder, created if need be.
            resume_step: the last step to keep, that of the loaded checkpoint; None starts both records afresh.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        first_new_step = 0 if resume_step is None else resume_step + 1
        if path.exists():
            drop_from(path, first_new_step)
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_new_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one line and one TensorBoard point a metric; NaN and infinities become "nan", "inf" and "-inf"."""
        record = {"step": step} | {name: _json_number(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """The records of a metrics.jsonl in order, non-finite numbers restored, a half-written last line left out."""
    for _, record in step_records(path):
        yield {name: float(value) if isinstance(value, str) else value for name, value in record.items()}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))
