"""Metrics and chance levels as pure functions of counts, and accumulators whose size does not grow with the data.

Counts are float64, (C,) for classes or (G,) for groups: `hits` counts correct predictions, `predicted` counts all
predictions of a class, and `support` or `counts` counts all samples of a class or group. Counts may be fractional: if
two classes have equal scores, each gets half a prediction. scikit-learn and WILDS compute the same metrics from lists
of predictions.
"""

from math import comb

import torch
from torch import Tensor
from torch.nn import functional

from neuclip_ds.distributed.communicator import Communicator


def ratio(hits: Tensor, counts: Tensor) -> float:
    """Return the accuracy: the sum of the hits divided by the sum of the counts."""
    return float(hits.sum() / counts.sum())


def mean_recall(hits: Tensor, support: Tensor) -> float:
    """Return the balanced accuracy ("mean per class recall"): hits / support averaged over the classes that occur."""
    return float(_rates(hits, support).mean())


def macro_f1(hits: Tensor, predicted: Tensor, support: Tensor) -> float:
    """Return F1 = 2 hits / (predicted + support), averaged over the classes that occur, as WILDS does for iWildCam.

    A class that is predicted but never occurs is excluded and does not affect the precision of other classes.
    """
    occurs = support > 0
    return float((2 * hits[occurs] / (predicted[occurs] + support[occurs])).mean())


def worst_group(hits: Tensor, counts: Tensor) -> float:
    """Return the smallest accuracy among the groups that occur."""
    return float(_rates(hits, counts).min())


def _rates(hits: Tensor, counts: Tensor) -> Tensor:
    """Return hits / counts for the classes or groups that occur."""
    occurs = counts > 0
    return hits[occurs] / counts[occurs]


def jaccard(truth: Tensor, prediction: Tensor) -> float:
    """Return the Jaccard index, intersection over union, of two sets given as (n,) masks."""
    return int((truth & prediction).sum()) / int((truth | prediction).sum())


def hit_probability(ahead: Tensor, tied: Tensor, k: int, matches: Tensor | int = 1) -> Tensor:
    """Return the probability that a match is among the first k candidates when ties are broken at random.

    Args:
        ahead: (n,) counts of negatives with a higher score than the match.
        tied: (n,) counts of negatives with exactly the same score as the match.
        k: number of first candidates among which a match counts as a hit.
        matches: (n,) counts of matches with this score; one match among the first k suffices.

    Returns:
        (n,) float64 probabilities that a match is in one of the remaining k - ahead positions, which ties fill in
        random order.
    """
    missed = torch.ones_like(ahead, dtype=torch.float64)
    for position in range(k):  # the position among the candidates with this score, from 0
        is_counted = ahead + position < k
        negatives_left = (tied - position).clamp(min=0)
        candidates_left = (tied + matches - position).clamp(min=1)
        missed_here = negatives_left.double() / candidates_left
        missed = torch.where(is_counted, missed * missed_here, missed)
    return 1 - missed


def chance_recall(k: int, candidates: int) -> float:
    """Return the expected recall@k of a random ranking with one match, which is the chance level of top-k accuracy."""
    return min(1.0, k / candidates)


def chance_macro_f1(support: Tensor) -> float:
    """Return the macro F1 of uniformly random predictions; `support`, (C,), is the number of samples per class."""
    share = support[support > 0] / support.sum()
    return float((2 * share / (share * len(support) + 1)).mean())


def chance_jaccard(candidates: int, right: int) -> float:
    """Return the expected Jaccard index if `right` candidates are correct and `right` are chosen at random."""
    smallest_overlap = max(0, 2 * right - candidates)
    weighted_indices = []
    for overlap in range(smallest_overlap, right + 1):
        choices = comb(right, overlap) * comb(candidates - right, right - overlap)  # choices with this overlap
        union = 2 * right - overlap
        weighted_indices.append(choices * overlap / union)
    return sum(weighted_indices) / comb(candidates, right)


class ClassAccumulator:
    """Accumulator of counts per class, each (C,) float64.

    For each class, `support` counts its samples, `top1` counts its samples for which the class is predicted first,
    `top5` counts its samples for which the class is among the first five predictions, and `predicted` counts all
    samples for which the class is predicted first.
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self._set_counts(torch.zeros((4, classes), dtype=torch.float64, device=device))

    def _set_counts(self, counts: Tensor) -> None:
        self._counts = counts
        self.top1, self.top5, self.support, self.predicted = counts.unbind()  # views

    def add(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Add a batch of (n, C) scores and (n,) int64 labels.

        Ties are resolved in expectation. A NaN score counts as higher than the label's, and no class is predicted first
        for a sample with a NaN score. Returns two (n,) float64 tensors: the probabilities that the label is predicted
        first and that it is among the first five.
        """
        label_score = scores.gather(1, labels[:, None])
        ahead = (~(scores <= label_score)).sum(dim=1)
        tied = (scores == label_score).sum(dim=1) - 1
        tied = tied.clamp(min=0)  # -1 if the label's score is NaN
        top1 = hit_probability(ahead, tied, k=1)
        top5 = hit_probability(ahead, tied, k=5)
        self._counts[:3].index_add_(1, labels, torch.stack([top1, top5, torch.ones_like(top1)]))
        is_best = (scores == scores.amax(dim=1, keepdim=True)).double()
        best_classes = is_best.sum(dim=1, keepdim=True).clamp(min=1)  # more than one if their scores are equal
        self.predicted += (is_best / best_classes).sum(dim=0)
        return top1, top5

    def all_reduce(self, communicator: Communicator) -> None:
        """Replace this rank's counts with the sums over all ranks."""
        self._set_counts(communicator.all_reduce(self._counts, "evaluation"))


class GroupAccumulator:
    """Accumulator of hits and counts per group, (G,) float64. Groups are numbered from 0, and G grows as needed."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._set_sums(torch.zeros((2, 0), dtype=torch.float64, device=device))

    def _set_sums(self, sums: Tensor) -> None:
        self._sums = sums
        self.hits, self.counts = sums.unbind()  # views

    def add(self, hits: Tensor, groups: Tensor) -> None:
        """Add a batch of (n,) hit probabilities and (n,) int64 group numbers; `groups` is in host memory."""
        if len(groups):
            self._grow(int(groups.max()) + 1)
            groups_on_device = groups.to(hits.device, non_blocking=True)
            self._sums.index_add_(1, groups_on_device, torch.stack([hits, torch.ones_like(hits)]))

    def all_reduce(self, communicator: Communicator) -> None:
        """Replace this rank's hits and counts with the sums over all ranks."""
        self._grow(max(communicator.gather_objects(self._sums.shape[1])))
        self._set_sums(communicator.all_reduce(self._sums, "evaluation"))

    def _grow(self, groups: int) -> None:
        missing = max(0, groups - self._sums.shape[1])
        self._set_sums(functional.pad(self._sums, (0, missing)))
