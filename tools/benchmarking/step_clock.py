"""A hook that measures the CPU time of training steps."""

import time
from typing import TYPE_CHECKING

from neuclip_ds.training.hooks import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult


class StepClock(Hook):
    """Measures the CPU time of this process from the end of a launch's first step to the end of its last step."""

    def __init__(self) -> None:
        self.steps = 0
        self._first = 0.0
        self._last = 0.0

    def after_step(self, loop: "Loop", result: "StepResult") -> None:
        self._last = time.process_time()
        if self.steps == 0:
            self._first = self._last
        self.steps += 1

    @property
    def seconds(self) -> float:
        """CPU seconds of all steps except the first."""
        return self._last - self._first

    @property
    def seconds_per_step(self) -> float:
        """Mean CPU seconds of a step other than the first; 0 after a single step."""
        return self.seconds / max(1, self.steps - 1)
