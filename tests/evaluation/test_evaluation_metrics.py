"""Metrics from counts against the same metrics from lists of predictions, written out as scikit-learn defines them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuclip_ds.evaluation.metrics import hit_probability, jaccard, macro_f1, mean_recall, worst_group

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


def test_f1_by_hand() -> None:
    """Truth 0 0 0 1, guess 0 0 1 2: F1 of class 0 is 4/5, of class 1 0; class 2 never occurs and does not count."""
    assert macro_f1(torch.tensor([2.0, 0, 0]), torch.tensor([2.0, 1, 1]), torch.tensor([3.0, 1, 0])) == pytest.approx(
        0.4
    )


def test_worst_group_leaves_out_groups_that_do_not_occur() -> None:
    assert worst_group(torch.tensor([3.0, 0, 1]), torch.tensor([4.0, 0, 2])) == 0.5


def test_jaccard() -> None:
    truth, guess = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert jaccard(truth, guess) == pytest.approx(1 / 3)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("tied", [0, 1, 3])
@pytest.mark.parametrize("matches", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_hit_probability_counts_all_orders_of_the_tied(ahead: int, tied: int, matches: int, k: int) -> None:
    orders = list(itertools.permutations([True] * matches + [False] * tied))
    wanted = sum(any(order[: max(0, k - ahead)]) for order in orders) / len(orders)
    found = hit_probability(torch.tensor([ahead]), torch.tensor([tied]), k, torch.tensor([matches]))
    assert float(found) == pytest.approx(wanted, abs=1e-12)
