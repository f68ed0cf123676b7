"""Accumulators of the metrics: ties, NaN, groups that appear late, and the sum over ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from neuclip_ds.evaluation.accumulators import ClassAccumulator, GroupAccumulator


def test_ties_are_shared_and_nan_is_predicted_as_no_class() -> None:
    counts = ClassAccumulator(3)
    scores = torch.tensor([[5.0, 5.0, 1.0], [0.0, 1.0, 2.0], [math.nan, 1.0, 2.0]])
    top1, top5 = counts.add(scores, torch.tensor([0, 2, 0]))
    assert top1.tolist() == [0.5, 1.0, 0.0]
    assert top5.tolist() == [1.0, 1.0, 1.0]  # three classes fit into five places
    assert counts.predicted.tolist() == [0.5, 0.5, 1.0]
    assert counts.support.tolist() == [2, 0, 1]
    assert counts.top1.tolist() == [0.5, 0.0, 1.0]


def test_any_batches_and_ranks_give_the_same(run_ranks: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(41, 7, generator=generator), torch.randint(0, 7, (41,), generator=generator)
    whole = ClassAccumulator(7)
    whole.add(scores, labels)

    def work(rank: Any) -> ClassAccumulator:
        counts = ClassAccumulator(7)
        for part in torch.arange(41)[rank.rank :: rank.world_size].split(4):
            counts.add(scores[part], labels[part])
        counts.all_reduce(rank)
        return counts

    for found in run_ranks(3, work):
        for name in ("top1", "top5", "predicted", "support"):
            assert torch.equal(getattr(found, name), getattr(whole, name))


def test_groups_grow_on_each_rank_by_themselves(run_ranks: Any) -> None:
    def work(rank: Any) -> GroupAccumulator:
        counts = GroupAccumulator()
        if rank.rank < 2:
            counts.add(torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor([rank.rank, 2 + 3 * rank.rank]))
        counts.all_reduce(rank)
        return counts

    for found in run_ranks(3, work):
        assert found.hits.tolist() == [1, 1, 0.5, 0, 0, 0.5]
        assert found.counts.tolist() == [1, 1, 1, 0, 0, 1]
