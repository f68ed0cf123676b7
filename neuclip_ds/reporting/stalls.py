"""Detection of data stalls: a single long wait of training for the loader, or a large share of time spent waiting.

The first step after a start is ignored: worker processes start and fill their queues in it.
"""

from collections import deque
from statistics import median
from typing import NamedTuple

_WINDOW, _MIN_STEPS = 50, 5  # steps of the usual time, and how many are needed for one
_SECONDS, _TIMES = 2.0, 5.0  # a wait is long above both this many seconds and this many usual steps
_INTERVAL = 60.0  # seconds of steps over which the share is measured
_SLOW, _FAST = 0.2, 0.1  # shares at which the loader becomes slow, and fast enough again


class Stall(NamedTuple):
    """A long wait, or the change of the loader to slow or back."""

    kind: str  # data_stall (one step), data_slow or data_fast (the interval that ends with the step)
    waited: float  # seconds of waiting in the step or interval
    seconds: float  # duration of the step or interval
    usual: float = float("nan")  # seconds of a usual step, NaN for intervals
    steps: int = 1  # length of the interval

    @property
    def share(self) -> float:
        return self.waited / self.seconds


class StallDetector:
    """Detector of stalls of this rank's loader, which is given the times of every step."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._started = self._slow = False
        self._waited, self._seconds, self._steps = 0.0, 0.0, 0  # of the interval

    def update(self, waited: float, seconds: float) -> list[Stall]:
        """Add a step's seconds of waiting for its batch and in all; return the stalls that end with it."""
        if not self._started:
            self._started = True
            return []
        found = [stall for stall in (self._check_step(waited, seconds), self._check_interval(waited, seconds)) if stall]
        self._recent.append(seconds)
        return found

    def _check_step(self, waited: float, seconds: float) -> Stall | None:
        if waited <= _SECONDS or len(self._recent) < _MIN_STEPS:
            return None
        usual = median(self._recent)
        return Stall("data_stall", waited, seconds, usual) if waited > _TIMES * usual else None

    def _check_interval(self, waited: float, seconds: float) -> Stall | None:
        """Return a change of the loader, once."""
        self._waited, self._seconds, self._steps = self._waited + waited, self._seconds + seconds, self._steps + 1
        if self._seconds < _INTERVAL or self._steps < _MIN_STEPS:
            return None
        change = Stall("data_fast" if self._slow else "data_slow", self._waited, self._seconds, steps=self._steps)
        self._waited, self._seconds, self._steps = 0.0, 0.0, 0
        if change.share < _FAST if self._slow else change.share > _SLOW:
            self._slow = not self._slow
            return change
        return None
