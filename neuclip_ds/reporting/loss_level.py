"""Is this loss far above where the loss has been? Robust statistics of the last steps, which a spike does not move.

The level is the median of a window, the deviation 1.4826 times the median distance from it (the standard deviation,
were the losses normal). A spike begins above `level + 10 deviations`: never by chance where losses are normal, once in
60,000 steps where their tails are exponential. A falling loss lies below its median.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

_WINDOW, _LEAST = 100, 50  # steps that the level is of, and that must have been seen
_BEGIN, _END = 10.0, 5.0  # deviations above the level
_CALM = 20  # steps in a row below the end, after which a spike is over: one warning per so many steps at most
_SMALLEST = 1e-3  # deviation, as a share of the level: losses that hardly move have none of their own


class Spike(NamedTuple):
    """What began or ended at a step.

    Attributes:
        kind: loss_spike, loss_back (below again) or loss_stays (so long that it is the new level).
        level, deviation: of the steps before the spike.
        steps: how many lay above, of one that has ended.
    """

    kind: str
    level: float
    deviation: float
    steps: int = 0


class LossLevel:
    """Sees the loss of every step and names the beginnings and ends of spikes."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._spike: Spike | None = None  # that has begun and not ended
        self._high, self._calm, self._age = 0, 0, 0  # steps above, in a row below and at all, since it began

    def update(self, loss: float) -> Spike | None:
        """Takes a step's loss; None unless a spike begins or ends with it."""
        found = self._follow(self._spike, loss) if self._spike is not None else self._begin(loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        return found

    def _begin(self, loss: float) -> Spike | None:
        if len(self._losses) < _LEAST:
            return None
        level = median(self._losses)
        deviation = max(1.4826 * median(abs(x - level) for x in self._losses), _SMALLEST * abs(level))
        if loss <= level + _BEGIN * deviation:
            return None
        self._spike = Spike("loss_spike", level, deviation)
        self._high, self._calm, self._age = 1, 0, 1
        return self._spike

    def _follow(self, spike: Spike, loss: float) -> Spike | None:
        above = not loss <= spike.level + _END * spike.deviation
        self._high, self._calm, self._age = self._high + above, 0 if above else self._calm + 1, self._age + 1
        if self._calm < _CALM and self._age < 2 * _WINDOW:
            return None
        self._spike = None
        return spike._replace(kind="loss_back" if self._calm >= _CALM else "loss_stays", steps=self._high)
