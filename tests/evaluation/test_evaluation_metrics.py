"""Compare metrics, accumulators and chance levels with direct computations from their definitions."""

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
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


def count_classes(labels: list[int]) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.int64).bincount(minlength=CLASSES).double()


@settings(max_examples=50)
@given(pairs)
def test_recall_and_f1_are_means_over_classes_that_occur(truths_and_guesses: list[tuple[int, int]]) -> None:
    truths = [truth for truth, _ in truths_and_guesses]
    guesses = [guess for _, guess in truths_and_guesses]
    correct = [truth for truth, guess in truths_and_guesses if truth == guess]
    recalls = []
    f1_scores = []
    for label in sorted(set(truths)):
        hits = correct.count(label)
        recall = hits / truths.count(label)
        recalls.append(recall)
        if hits:
            precision = hits / guesses.count(label)
            f1_scores.append(2 * precision * recall / (precision + recall))
        else:
            f1_scores.append(0.0)
    hit_counts = count_classes(correct)
    support = count_classes(truths)
    assert mean_recall(hit_counts, support) == pytest.approx(statistics.mean(recalls), abs=1e-12)
    assert macro_f1(hit_counts, count_classes(guesses), support) == pytest.approx(statistics.mean(f1_scores), abs=1e-12)


def test_hit_probability_is_the_share_of_orders_with_a_hit() -> None:
    for ahead, tied, matches, k in itertools.product([0, 1, 3], [0, 1, 3], [1, 2], [1, 2, 5]):
        orders = list(itertools.permutations([True] * matches + [False] * tied))
        expected = sum(any(order[: max(0, k - ahead)]) for order in orders) / len(orders)
        probability = hit_probability(torch.tensor([ahead]), torch.tensor([tied]), k, torch.tensor([matches]))
        assert float(probability) == pytest.approx(expected, abs=1e-12), (ahead, tied, matches, k)


def test_ties_are_shared_and_nan_is_predicted_as_no_class() -> None:
    counts = ClassAccumulator(3)
    scores = torch.tensor([[5.0, 5.0, 1.0], [0.0, 1.0, 2.0], [math.nan, 1.0, 2.0]])
    top1, top5 = counts.add(scores, torch.tensor([0, 2, 0]))
    assert top1.tolist() == [0.5, 1.0, 0.0]
    assert top5.tolist() == [1.0, 1.0, 1.0]  # there are only three classes
    assert counts.predicted.tolist() == [0.5, 0.5, 1.0]
    assert counts.support.tolist() == [2, 0, 1]
    assert counts.top1.tolist() == [0.5, 0.0, 1.0]


def test_ranks_with_different_groups_have_the_same_totals(run_ranks: Any) -> None:
    def work(communicator: Any) -> GroupAccumulator:
        groups = GroupAccumulator()
        rank = communicator.rank
        if rank < 2:
            groups.add(torch.tensor([1.0, 0.5], dtype=torch.float64), torch.tensor([rank, 2 + 3 * rank]))
        groups.all_reduce(communicator)
        return groups

    for groups in run_ranks(3, work):
        assert groups.hits.tolist() == [1, 1, 0.5, 0, 0, 0.5]
        assert groups.counts.tolist() == [1, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(("candidates", "right"), [(10, 3), (5, 4), (6, 6), (12, 1)])
def test_chance_jaccard_is_the_mean_over_all_choices(candidates: int, right: int) -> None:
    truth = set(range(right))
    choices = [set(choice) for choice in itertools.combinations(range(candidates), right)]
    mean = statistics.mean(len(truth & choice) / len(truth | choice) for choice in choices)
    assert chance_jaccard(candidates, right) == pytest.approx(mean)


def test_the_worst_group_is_one_that_occurs() -> None:
    assert worst_group(torch.tensor([3.0, 0, 1]), torch.tensor([4.0, 0, 2])) == 0.5


def test_jaccard_is_intersection_over_union() -> None:
    truth = torch.tensor([True, True, False, False])
    guess = torch.tensor([True, False, True, False])
    assert jaccard(truth, guess) == pytest.approx(1 / 3)


def test_chance_recall_is_at_most_one() -> None:
    assert chance_recall(5, 1000) == 0.005
    assert chance_recall(10, 4) == 1


def test_chance_macro_f1_is_the_mean_over_classes_that_occur() -> None:
    # each of the 3 classes gets 30 of the 90 guesses: 10 are right for class 0, and 20 for class 1
    expected = (2 * 10 / (30 + 30) + 2 * 20 / (30 + 60)) / 2
    assert chance_macro_f1(torch.tensor([30.0, 60.0, 0.0])) == pytest.approx(expected)
