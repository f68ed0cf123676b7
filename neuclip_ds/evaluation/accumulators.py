"""Streaming counts behind the metrics: sums by class and by group, joined over ranks; their size is not the data's."""

from __future__ import annotations

import torch
from torch import Tensor

from neuclip_ds.evaluation import Communicator
from neuclip_ds.evaluation.metrics import hit_probability


class ClassCounts:
    """By class (C,), float64.

    Attributes:
        top1, top5: samples of the class that are recognised at first, or among the first five.
        predicted: samples that are taken for the class.
        support: samples of the class.
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros((4, classes), dtype=torch.float64, device=device)

    @property
    def top1(self) -> Tensor:
        return self._sums[0]

    @property
    def top5(self) -> Tensor:
        return self._sums[1]

    @property
    def predicted(self) -> Tensor:
        return self._sums[2]

    @property
    def support(self) -> Tensor:
        return self._sums[3]

    def add(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Counts a batch.

        Ties count by expectation. A sample with a NaN score is taken for no class.

        Args:
            scores: (n, C) of each sample for each class; equal ones are ties.
            labels: (n,) int64.

        Returns:
            (n,) and (n,) float64: how far each sample is recognised at first, and among the first five.
        """
        own = scores.gather(1, labels[:, None])
        ahead = (~(scores <= own)).sum(dim=1)
        tied = (scores == own).sum(dim=1) - 1
        top1, top5 = (hit_probability(ahead, tied.clamp(min=0), k) for k in (1, 5))
        best = (scores == scores.amax(dim=1, keepdim=True)).double()
        self._sums[:2].index_add_(1, labels, torch.stack([top1, top5]))
        self._sums[2] += (best / best.sum(dim=1, keepdim=True).clamp(min=1)).sum(dim=0)
        self._sums[3] += labels.bincount(minlength=self._sums.shape[1])
        return top1, top5

    def join(self, communicator: Communicator) -> None:
        """Adds up what the ranks have counted."""
        self._sums = communicator.all_reduce(self._sums, "evaluation")


class GroupCounts:
    """By group (G,), float64, groups being whole numbers from 0 on; G is the largest that has been met, and one.

    Attributes:
        hits: samples of the group that are recognised.
        counts: samples of the group.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros((2, 0), dtype=torch.float64, device=device)

    @property
    def hits(self) -> Tensor:
        return self._sums[0]

    @property
    def counts(self) -> Tensor:
        return self._sums[1]

    def add(self, hits: Tensor, groups: Tensor) -> None:
        """Counts a batch: (n,) how far each sample is recognised, and (n,) int64 its group."""
        if len(groups):
            self._grow(int(groups.max()) + 1)
            self._sums.index_add_(1, groups, torch.stack([hits, torch.ones_like(hits)]))

    def join(self, communicator: Communicator) -> None:
        """Adds up what the ranks have counted."""
        size = torch.tensor([self._sums.shape[1]], device=self._sums.device)
        self._grow(int(communicator.all_gather(size, "evaluation").max()))
        self._sums = communicator.all_reduce(self._sums, "evaluation")

    def _grow(self, size: int) -> None:
        missing = size - self._sums.shape[1]
        if missing > 0:
            self._sums = torch.cat([self._sums, self._sums.new_zeros((2, missing))], dim=1)
