"""The learning rate as a function of the step."""

from __future__ import annotations

import pytest

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.training.schedules import warmup_cosine


def test_warm_up_then_half_cosine() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    found = [warmup_cosine(step, 12, config) for step in range(13)]
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert found[8] == pytest.approx(0.55)  # halfway down
    assert found[12] == pytest.approx(0.1)
    assert found[4:] == sorted(set(found[4:]), reverse=True)


def test_a_run_that_ends_within_its_warm_up() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=100)
    assert [warmup_cosine(step, 3, config) for step in range(3)] == [0.01, 0.02, 0.03]


def test_no_warm_up() -> None:
    assert warmup_cosine(0, 10, OptimizerConfig(lr=2.0, warmup_steps=0)) == 2.0
