"""Metrics of a run in TensorBoard's format, in RUN/tensorboard/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Sink that writes TensorBoard scalars; earlier points from `first_new_step` on are hidden."""

    def __init__(self, folder: Path, first_new_step: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_new_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()
