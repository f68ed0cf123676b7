"""Metrics as pure functions of counts, float64: what scikit-learn and WILDS compute from lists of predictions.

Counts may be fractions: of two classes that score exactly alike, each is predicted by a half.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ratio(hits: Tensor, counts: Tensor) -> float:
    """Sum of the hits over that of the counts: accuracy."""
    return float(hits.sum() / counts.sum())


def mean_recall(hits: Tensor, support: Tensor) -> float:
    """Mean over the classes that occur of hits / support (balanced accuracy, "mean per class recall").

    Args:
        hits: (C,) samples of each class that are recognised.
        support: (C,) samples of each class.
    """
    return float(_rates(hits, support).mean())


def macro_f1(hits: Tensor, predicted: Tensor, support: Tensor) -> float:
    """Mean over the classes that occur of F1 = 2 hits / (predicted + support), as WILDS defines it for iWildCam.

    A class that is predicted but never occurs lowers the precision of none and has no F1 of its own.

    Args:
        hits: (C,) samples of each class that are recognised.
        predicted: (C,) samples that are taken for each class.
        support: (C,) samples of each class.
    """
    occurs = support > 0
    return float((2 * hits[occurs] / (predicted[occurs] + support[occurs])).mean())


def worst_group(hits: Tensor, counts: Tensor) -> float:
    """Smallest accuracy of a group that occurs.

    Args:
        hits: (G,) samples of each group that are recognised.
        counts: (G,) samples of each group.
    """
    return float(_rates(hits, counts).min())


def _rates(hits: Tensor, counts: Tensor) -> Tensor:
    """Of those that occur."""
    occurs = counts > 0
    return hits[occurs] / counts[occurs]


def jaccard(truth: Tensor, prediction: Tensor) -> float:
    """Size of the intersection over that of the union of two sets, as masks (n,)."""
    return int((truth & prediction).sum()) / int((truth | prediction).sum())


def hit_probability(ahead: Tensor, tied: Tensor, k: int, own: Tensor | int = 1) -> Tensor:
    """Probability that a match is among the first k candidates when ties are put in random order.

    Args:
        ahead: (n,) rivals strictly above the match.
        tied: (n,) rivals exactly level with it.
        k: places.
        own: (n,) matches at that level, of which one suffices.

    Returns:
        (n,) float64: the k - ahead places left being filled at random from tied + own, that not all go to rivals.
    """
    missed = torch.ones_like(ahead, dtype=torch.float64)
    for place in range(k):
        free = ahead + place < k
        share = (tied - place).clamp(min=0).double() / (tied + own - place).clamp(min=1)
        missed = torch.where(free, missed * share, missed)
    return 1 - missed
