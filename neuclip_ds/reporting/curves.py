"""Curves of many points made readable: few bins with their spread, and a smooth line through them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_BINS = 400  # of a curve, about one for each pixel of a plot
_SMOOTHED_FROM = 60  # points; fewer are drawn as they are
_WINDOW = 1 / 40  # of a curve's bins, over which the line is a mean
_FAR = 3.0  # times the usual spread, beyond which points are outliers that would flatten a plot


class Curve(NamedTuple):
    """At most 400 bins of a metric; all arrays have a bin each."""

    steps: Array
    line: Array  # smoothed
    low: Array  # smallest and largest value of the bin
    high: Array
    window: int  # points that a point of the line is the mean of; 1 if it is not smoothed


def summarize(steps: Sequence[int], values: Sequence[float], log_scale: bool = False) -> Curve | None:
    """Return a curve without the values that cannot be drawn, None if none can.

    Args:
        steps, values: equally many, in order of steps.
        log_scale: whether the values' axis is logarithmic, so that means are geometric and values positive.
    """
    x, y = np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
    drawn = np.isfinite(y) & ((y > 0) | (not log_scale))
    x, y = x[drawn], y[drawn]
    if not len(x):
        return None
    bins = min(len(x), _BINS)
    starts = np.arange(bins) * len(x) // bins
    counts = np.diff(starts, append=len(x))
    of_line = np.log(y) if log_scale else y
    line = np.add.reduceat(of_line, starts) / counts
    window = max(1, round(bins * _WINDOW)) | 1 if len(x) >= _SMOOTHED_FROM else 1  # odd, to lie around its bin
    line = _moving_mean(line, window)
    return Curve(
        np.add.reduceat(x, starts) / counts,
        np.exp(line) if log_scale else line,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
        round(window * len(x) / bins),
    )


def limits(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Return the range of values without far outliers, None if there are none."""
    values = np.concatenate([np.concatenate([curve.low, curve.high]) for curve in curves])
    low, high = np.quantile(values, [0.01, 0.99])
    spread = max(high - low, 1e-12 * max(abs(low), abs(high)))
    if values.min() >= low - _FAR * spread and values.max() <= high + _FAR * spread:
        return None
    return max(float(values.min()), low - 0.1 * spread), min(float(values.max()), high + 0.1 * spread)


def _moving_mean(y: Array, window: int) -> Array:
    """Return means over a centred window, which is shorter at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    half = np.minimum(np.minimum(np.arange(len(y)), np.arange(len(y))[::-1]), window // 2)
    places = np.arange(len(y))
    return (sums[places + half + 1] - sums[places - half]) / (2 * half + 1)
