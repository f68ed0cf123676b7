"""Keep the moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuclip_ds.engine.average import WeightAverage
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class AverageWeights(Hook):
    """Update the average after each step that was not skipped, before a checkpoint is saved."""

    def __init__(self, average: WeightAverage) -> None:
        self._average = average

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.applied:
            self._average.update(result.step)
