"""Detection of loss spikes by robust statistics of the last steps, which a spike does not move.

The level is the median of a window, the deviation 1.4826 times the median distance from it (the standard deviation,
if losses are normal). A spike begins above `level + 10 deviations`: never by chance where losses are normal, once in
60,000 steps where their tails are exponential. A falling loss is below its median.
"""

import math
from collections import deque
from statistics import median
from typing import NamedTuple

_WINDOW, _MIN_STEPS = 100, 50  # steps of the level, and how many are needed for one
_BEGIN, _END = 10.0, 5.0  # deviations above the level
_CALM = 20  # steps in a row below the end, after which a spike is over: at most one warning per this many steps
_MIN_DEVIATION = 1e-3  # as a share of the level, for losses that hardly vary


class Spike(NamedTuple):
    """Beginning or end of a loss spike."""

    kind: str  # loss_spike, loss_back (below again) or loss_stays (above for so long that it is the new level)
    level: float  # of the steps before the spike, as the deviation
    deviation: float
    steps: int = 0  # how many were above, of a spike that has ended


class LossSpikeDetector:
    """Detector of the beginnings and ends of spikes, which is given the loss of every step."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._spike: Spike | None = None  # the current one
        self._above, self._calm, self._age = 0, 0, 0  # steps above, in a row below and in all, since it began

    def update(self, loss: float) -> Spike | None:
        """Add a step's loss; return a spike that begins or ends with it, otherwise None."""
        found = self._follow(self._spike, loss) if self._spike is not None else self._begin(loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        return found

    def _begin(self, loss: float) -> Spike | None:
        if len(self._losses) < _MIN_STEPS:
            return None
        level = median(self._losses)
        deviation = max(1.4826 * median(abs(x - level) for x in self._losses), _MIN_DEVIATION * abs(level))
        if loss <= level + _BEGIN * deviation:
            return None
        self._spike = Spike("loss_spike", level, deviation)
        self._above, self._calm, self._age = 1, 0, 1
        return self._spike

    def _follow(self, spike: Spike, loss: float) -> Spike | None:
        above = not loss <= spike.level + _END * spike.deviation
        self._above, self._calm, self._age = self._above + above, 0 if above else self._calm + 1, self._age + 1
        if self._calm < _CALM and self._age < 2 * _WINDOW:
            return None
        self._spike = None
        return spike._replace(kind="loss_back" if self._calm >= _CALM else "loss_stays", steps=self._above)
