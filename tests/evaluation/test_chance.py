"""Chance against what a random choice gives on average."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

from neuclip_ds.evaluation import chance


def test_recall():
    assert chance.recall(5, 1000) == 0.005
    assert chance.recall(10, 4) == 1


@pytest.mark.parametrize(("candidates", "right"), [(10, 3), (5, 4), (6, 6), (12, 1)])
def test_jaccard_is_the_mean_over_all_choices(candidates: int, right: int) -> None:
    truth = set(range(right))
    choices = [set(choice) for choice in itertools.combinations(range(candidates), right)]
    mean = statistics.mean(len(truth & choice) / len(truth | choice) for choice in choices)
    assert chance.jaccard(candidates, right) == pytest.approx(mean)


def test_macro_f1_of_even_guesses():
    support = torch.tensor([30.0, 60.0, 0.0])
    # of 90 guesses each class gets 30: of class 0 10 are right, of class 1 20
    wanted = (2 * 10 / (30 + 30) + 2 * 20 / (30 + 60)) / 2
    assert chance.macro_f1(support) == pytest.approx(wanted)
