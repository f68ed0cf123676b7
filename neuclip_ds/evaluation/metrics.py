"""Metrics as pure functions of float64 counts: what scikit-learn and WILDS compute from lists of predictions.

The counts are (C,) by class or (G,) by group: samples that are predicted correctly (`hits`), that are predicted as the
class (`predicted`), and all (`support`, `counts`). They may be fractions: of two classes with equal scores, each counts
as predicted by a half.
"""

import torch
from torch import Tensor


def ratio(hits: Tensor, counts: Tensor) -> float:
    """Return the accuracy: the sum of the hits over that of the counts."""
    return float(hits.sum() / counts.sum())


def mean_recall(hits: Tensor, support: Tensor) -> float:
    """Return the balanced accuracy ("mean per class recall"): hits / support averaged over the classes that occur."""
    return float(_rates(hits, support).mean())


def macro_f1(hits: Tensor, predicted: Tensor, support: Tensor) -> float:
    """Return F1 = 2 hits / (predicted + support) averaged over the classes that occur, as WILDS does for iWildCam.

    A class that is predicted but never occurs has no F1 and lowers no other class's precision.
    """
    occurs = support > 0
    return float((2 * hits[occurs] / (predicted[occurs] + support[occurs])).mean())


def worst_group(hits: Tensor, counts: Tensor) -> float:
    """Return the smallest accuracy among the groups that occur."""
    return float(_rates(hits, counts).min())


def _rates(hits: Tensor, counts: Tensor) -> Tensor:
    """Return hits / counts of the classes or groups that occur."""
    occurs = counts > 0
    return hits[occurs] / counts[occurs]


def jaccard(truth: Tensor, prediction: Tensor) -> float:
    """Return the Jaccard index, intersection over union, of two sets given as masks (n,)."""
    return int((truth & prediction).sum()) / int((truth | prediction).sum())


def hit_probability(ahead: Tensor, tied: Tensor, k: int, matches: Tensor | int = 1) -> Tensor:
    """Return the probability that a match is among the first k candidates when ties are broken at random.

    Args:
        ahead: (n,) negatives with a higher score than the match.
        tied: (n,) negatives with exactly the same score.
        k: length of the list.
        matches: (n,) matches with that score, of which one suffices.

    Returns:
        (n,) float64: the k - ahead places left are filled at random from tied + matches; not all go to negatives.
    """
    missed = torch.ones_like(ahead, dtype=torch.float64)
    for place in range(k):
        free = ahead + place < k
        share = (tied - place).clamp(min=0).double() / (tied + matches - place).clamp(min=1)
        missed = torch.where(free, missed * share, missed)
    return 1 - missed
