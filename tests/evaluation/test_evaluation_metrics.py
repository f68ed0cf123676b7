"""Compare metrics, accumulators and chance levels with direct computations from their definitions."""

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuclip_ds.evaluation.metrics import (
    ClassAccumulator,
    GroupAccumulator,
    chance_jaccard,
    chance_macro_f1,
    chance_recall,
    hit_probability,
    jaccard,
    macro_f1,
    mean_recall,
    worst_group,
)

CLASSES = 5
pairs = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=30)


def counts(of: list[int], classes: int = CLASSES) -> torch.Tensor:
    return torch.tensor(of, dtype=torch.int64).bincount(minlength=classes).double()


@given(pairs)
def test_recall_and_f1_over_classes_that_occur(found: list[tuple[int, int]]) -> None:
    truth, guess = zip(*found, strict=True)
    recalls, f1 = [], []
    for label in sorted(set(truth)):
        hits = sum(t == g == label for t, g in found)
        recall, named = hits / truth.count(label), guess.count(label)
        precision = hits / named if named else 0.0
        recalls.append(recall)
        f1.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    right = counts([t for t, g in found if t == g])
    support, predicted = counts(list(truth)), counts(list(guess))
    assert mean_recall(right, support) == pytest.approx(sum(recalls) / len(recalls), abs=1e-12)
    assert macro_f1(right, predicted, support) == pytest.approx(sum(f1) / len(f1), abs=1e-12)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("tied", [0, 1, 3])
@pytest.mark.parametrize("matches", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_hit_probability_counts_all_orders_of_the_tied(ahead: int, tied: int, matches: int, k: int) -> None:
    orders = list(itertools.permutations([True] * matches + [False] * tied))
    wanted = sum(any(order[: max(0, k - ahead)]) for order in orders) / len(orders)
    found = hit_probability(torch.tensor([ahead]), torch.tensor([tied]), k, torch.tensor([matches]))
    assert float(found) == pytest.approx(wanted, abs=1e-12)


def test_ties_are_shared_and_nan_is_predicted_as_no_class() -> None:
    counts = ClassAccumulator(3)
    scores = torch.tensor([[5.0, 5.0, 1.0], [0.0, 1.0, 2.0], [math.nan, 1.0, 2.0]])
    top1, top5 = counts.add(scores, torch.tensor([0, 2, 0]))
    assert top1.tolist() == [0.5, 1.0, 0.0]
    assert top5.tolist() == [1.0, 1.0, 1.0]  # there are only three classes
    assert counts.predicted.tolist() == [0.5, 0.5, 1.0]
    assert counts.support.tolist() == [2, 0, 1]
    assert counts.top1.tolist() == [0.5, 0.0, 1.0]


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


@pytest.mark.parametrize(("candidates", "right"), [(10, 3), (5, 4), (6, 6), (12, 1)])
def test_jaccard_is_the_mean_over_all_choices(candidates: int, right: int) -> None:
    truth = set(range(right))
    choices = [set(choice) for choice in itertools.combinations(range(candidates), right)]
    mean = statistics.mean(len(truth & choice) / len(truth | choice) for choice in choices)
    assert chance_jaccard(candidates, right) == pytest.approx(mean)


def test_small_cases() -> None:
    assert worst_group(torch.tensor([3.0, 0, 1]), torch.tensor([4.0, 0, 2])) == 0.5, "groups that occur"
    truth, guess = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert jaccard(truth, guess) == pytest.approx(1 / 3)
    assert (chance_recall(5, 1000), chance_recall(10, 4)) == (0.005, 1)
    # each of the 3 classes gets 30 of the 90 guesses: 10 are right for class 0, and 20 for class 1
    wanted = (2 * 10 / (30 + 30) + 2 * 20 / (30 + 60)) / 2
    assert chance_macro_f1(torch.tensor([30.0, 60.0, 0.0])) == pytest.approx(wanted)
