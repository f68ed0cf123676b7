"""Chance: the score that is expected of a model that ranks at random, to hold a score against."""

from __future__ import annotations

from math import comb

from torch import Tensor


def recall(k: int, candidates: int) -> float:
    """Return the recall@k of one match among so many candidates, and the top-k accuracy over so many classes."""
    return min(1.0, k / candidates)


def macro_f1(support: Tensor) -> float:
    """Return F1 averaged over the classes that occur, of (C,) samples by class, as each is predicted equally often."""
    share = support[support > 0] / support.sum()
    return float((2 * share / (share * len(support) + 1)).mean())


def jaccard(candidates: int, right: int) -> float:
    """Return the Jaccard index of a choice of as many candidates as are right."""
    overlaps = range(max(0, 2 * right - candidates), right + 1)
    ways = {overlap: comb(right, overlap) * comb(candidates - right, right - overlap) for overlap in overlaps}
    return sum(n * overlap / (2 * right - overlap) for overlap, n in ways.items()) / comb(candidates, right)
