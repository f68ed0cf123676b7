"""Differences of two arms over the same seeds, with confidence intervals."""

import statistics
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from scipy.stats import t as student


class Difference(NamedTuple):
    """Mean of paired differences and the half width of its 95 % interval, by Student's t over the seeds."""

    mean: float
    half_width: float  # infinite with one pair
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.mean) > self.half_width

    def __str__(self) -> str:
        interval = f" ± {self.half_width:.2f}" if self.pairs > 1 else ""
        return f"{self.mean:+.2f}{interval}"


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return the mean of `ours - theirs`, whose entries belong to the same seeds in order.

    Raises:
        ValueError: they differ in number, or are empty.
    """
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    if not gains:
        raise ValueError("there is nothing to compare")
    if len(gains) == 1:
        return Difference(gains[0], float("inf"), 1)
    quantile = float(student.ppf(0.975, len(gains) - 1))
    return Difference(statistics.mean(gains), quantile * statistics.stdev(gains) / sqrt(len(gains)), len(gains))
