"""Did the loader keep training waiting? Single long waits, and a share of the time that is too large for long.

The first step of a start is left out: worker processes start and fill their queues in it.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

_WINDOW, _LEAST = 50, 5  # steps whose usual time is known, and that must have been seen
_SECONDS, _TIMES = 2.0, 5.0  # a wait is long beyond the larger of so many seconds and so many usual steps
_INTERVAL = 60.0  # seconds of steps over which the share is taken
_SLOW, _FAST = 0.2, 0.1  # shares at which the loader is told slow, and fast enough again


class Stall(NamedTuple):
    """What is to be said of the loader.

    Attributes:
        kind: data_stall (one step), data_slow or data_fast (the interval that ended with the step).
        waited: seconds, of the step or interval.
        seconds: the step or interval took with all.
        usual: seconds of a step, NaN for intervals.
        steps: that it is about.
    """

    kind: str
    waited: float
    seconds: float
    usual: float = float("nan")
    steps: int = 1

    @property
    def share(self) -> float:
        return self.waited / self.seconds


class StallWatch:
    """Sees the times of every step of a start, on its own rank."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._began = False
        self._slow = False
        self._waited, self._seconds, self._steps = 0.0, 0.0, 0  # of the interval

    def update(self, waited: float, seconds: float) -> list[Stall]:
        """
        Args:
            waited: seconds until the step's batch was there.
            seconds: that the step took, the wait included.
        """
        if not self._began:
            self._began = True
            return []
        found = [stall for stall in (self._single(waited, seconds), self._interval(waited, seconds)) if stall]
        self._recent.append(seconds)
        return found

    def _single(self, waited: float, seconds: float) -> Stall | None:
        if waited <= _SECONDS or len(self._recent) < _LEAST:
            return None
        usual = median(self._recent)
        return Stall("data_stall", waited, seconds, usual) if waited > _TIMES * usual else None

    def _interval(self, waited: float, seconds: float) -> Stall | None:
        """Tells a change, once."""
        self._waited, self._seconds, self._steps = self._waited + waited, self._seconds + seconds, self._steps + 1
        if self._seconds < _INTERVAL or self._steps < _LEAST:
            return None
        told = Stall("data_fast" if self._slow else "data_slow", self._waited, self._seconds, steps=self._steps)
        self._waited, self._seconds, self._steps = 0.0, 0.0, 0
        if told.share < _FAST if self._slow else told.share > _SLOW:
            self._slow = not self._slow
            return told
        return None
