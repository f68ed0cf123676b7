"""The learning rate as a function of the step."""

from __future__ import annotations

import pytest

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.recipe import parse
from neuclip_ds.training.schedules import SHAPES, fitted_warmup, learning_rate


def rates(total: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, **options})
    return [learning_rate(step, total, config) for step in range(total + 1)]


def test_warm_up_then_half_cosine() -> None:
    found = rates(12)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert found[8] == pytest.approx(0.55)  # halfway down
    assert found[12] == pytest.approx(0.1)
    assert found[4:] == sorted(set(found[4:]), reverse=True)


def test_constant_stays_at_its_peak() -> None:
    assert rates(12, schedule="constant")[3:] == [1.0] * 10


@pytest.mark.parametrize(("schedule", "quarter"), [("cooldown", 1 - 0.9 * 0.25), ("wsd", 1 - 0.9 * 0.5)])
def test_the_last_part_comes_down(schedule: str, quarter: float) -> None:
    found = rates(24, schedule=schedule, cooldown_steps=8)
    assert found[4:17] == [1.0] * 13
    assert found[18] == pytest.approx(quarter)
    assert found[24] == pytest.approx(0.1)
    by_default = rates(40, schedule=schedule)
    assert by_default[32] == 1.0 > by_default[33], "a fifth of the run"
    assert by_default[40] == pytest.approx(0.1)


def test_a_cooldown_begins_after_the_warm_up() -> None:
    found = rates(10, schedule="cooldown", cooldown_steps=100)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[7] == pytest.approx(0.55)


@pytest.mark.parametrize("schedule", ["constant", "cooldown", "wsd"])
def test_a_constant_run_can_be_prolonged_by_a_cooldown(schedule: str) -> None:
    """What is behind a checkpoint of the constant part does not depend on what follows."""
    assert rates(30, schedule=schedule, cooldown_steps=10)[:21] == rates(20, schedule="constant")


@pytest.mark.parametrize("schedule", sorted(SHAPES))
def test_rates_lie_between_their_ends(schedule: str) -> None:
    for total in (1, 2, 3, 7, 50):
        found = rates(total, schedule=schedule)
        assert all(0.1 <= rate <= 1.0 for rate in found[fitted_warmup(4, total) :]), (total, found)


def test_a_warm_up_that_is_too_long_is_fitted() -> None:
    assert [fitted_warmup(100, total) for total in (3, 10, 99, 100, 101)] == [0, 1, 9, 10, 100]
    assert rates(100, warmup_steps=500)[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert rates(3, warmup_steps=100)[0] == 1.0


def test_no_warm_up() -> None:
    assert rates(10, warmup_steps=0)[0] == 1.0


def test_rates_are_scaled_to_the_batch() -> None:
    given = ["demo", "--optimizer.lr=0.001", "--optimizer.min_lr=1e-4", "--optimizer.base_batch_size=64"]
    linear = parse(given).config.with_scaled_rates()
    assert (linear.optimizer.lr, linear.optimizer.min_lr) == (0.004, 4e-4)  # the demo's batch is 256
    root = parse([*given, "--optimizer.batch_rule=sqrt"]).config.with_scaled_rates()
    assert root.optimizer.lr == 0.002
    assert linear.with_scaled_rates() == linear, "what a run's config.yaml holds is not scaled again"
    plain = parse(["demo"]).config
    assert plain.with_scaled_rates() == plain
