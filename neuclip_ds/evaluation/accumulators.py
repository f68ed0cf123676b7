"""Accumulators of the metrics: streaming sums per class and per group, whose size does not grow with the data."""

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.evaluation.metrics import hit_probability


class ClassAccumulator:
    """Hits, predictions and support per class, each (C,) float64.

    Attributes:
        top1, top5: samples of the class whose first, or one of whose first five, predictions is right.
        predicted: samples that are predicted as the class.
        support: samples of the class.
    """

    def __init__(self, classes: int, device: torch.device | str = "cpu") -> None:
        self._hold(torch.zeros((4, classes), dtype=torch.float64, device=device))

    def _hold(self, sums: Tensor) -> None:
        self._sums = sums
        self.top1, self.top5, self.support, self.predicted = sums.unbind()  # views

    def add(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Add a batch; ties count by expectation, and a sample with a NaN score is predicted as no class.

        Args:
            scores: (n, C) of each sample for each class; equal ones are ties.
            labels: (n,) int64.

        Returns:
            (n,) and (n,) float64: probability that each sample's label is predicted first, and among the first five.
        """
        label_score = scores.gather(1, labels[:, None])
        ahead = (~(scores <= label_score)).sum(dim=1)
        tied = (scores == label_score).sum(dim=1) - 1
        top1, top5 = (hit_probability(ahead, tied.clamp(min=0), k) for k in (1, 5))
        best = (scores == scores.amax(dim=1, keepdim=True)).double()
        self._sums[:3].index_add_(1, labels, torch.stack([top1, top5, torch.ones_like(top1)]))
        self.predicted += (best / best.sum(dim=1, keepdim=True).clamp(min=1)).sum(dim=0)
        return top1, top5

    def all_reduce(self, communicator: Communicator) -> None:
        """Replace this rank's sums by those over all ranks."""
        self._hold(communicator.all_reduce(self._sums, "evaluation"))


class GroupAccumulator:
    """Hits and counts per group, each (G,) float64; groups are numbered from 0, and G follows the largest one added."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros((2, 0), dtype=torch.float64, device=device)

    @property
    def hits(self) -> Tensor:
        """Samples of each group that are predicted correctly."""
        return self._sums[0]

    @property
    def counts(self) -> Tensor:
        """Samples of each group."""
        return self._sums[1]

    def add(self, hits: Tensor, groups: Tensor) -> None:
        """Add a batch: (n,) probability of a hit and, in host memory, (n,) int64 group of each sample."""
        if len(groups):
            self._grow(int(groups.max()) + 1)
            places = groups.to(hits.device, non_blocking=True)
            self._sums.index_add_(1, places, torch.stack([hits, torch.ones_like(hits)]))

    def all_reduce(self, communicator: Communicator) -> None:
        """Replace this rank's sums by those over all ranks."""
        self._grow(max(communicator.gather_objects(self._sums.shape[1])))
        self._sums = communicator.all_reduce(self._sums, "evaluation")

    def _grow(self, size: int) -> None:
        missing = size - self._sums.shape[1]
        if missing > 0:
            self._sums = torch.cat([self._sums, self._sums.new_zeros((2, missing))], dim=1)
