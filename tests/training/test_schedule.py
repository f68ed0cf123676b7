"""Test the number of steps of a run and the learning rate of each step."""

import numpy as np
import pytest

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.training.schedule import fitted_warmup, is_partial_batch, learning_rate, run_length


def order_of(samples: int) -> GlobalOrder:
    return GlobalOrder(np.array([0]), np.array([samples]), 10, 3)


def test_the_last_batch_of_an_epoch_is_partial_if_it_is_less_than_half_full() -> None:
    assert [is_partial_batch(order_of(24), step) for step in range(6)] == [False, False, True, False, False, True]
    assert not any(is_partial_batch(order_of(25), step) for step in range(6)), "half a batch"
    assert not is_partial_batch(order_of(4), 0), "every batch is alike"


def test_a_run_has_the_steps_of_its_epochs_at_least_one_or_max_steps() -> None:
    order = order_of(100)  # ten steps per epoch
    assert run_length(order, 2.5) == 25
    assert run_length(order, 0.01) == 1
    assert run_length(order, 1.0, max_steps=30) == 30


def rates(total: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, **options})
    return [learning_rate(step, total, config) for step in range(total + 1)]


CASES: dict[str, tuple[int, dict[str, object], dict[int, float]]] = {  # steps, options, learning rates at some steps
    "warm-up, half cosine": (12, {}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 8: 0.55, 12: 0.1}),
    "constant": (12, {"schedule": "constant"}, dict.fromkeys(range(3, 13), 1.0)),
    "cooldown": (24, {"schedule": "cooldown", "cooldown_steps": 8}, {4: 1.0, 16: 1.0, 18: 0.775, 24: 0.1}),
    "wsd": (24, {"schedule": "wsd", "cooldown_steps": 8}, {4: 1.0, 16: 1.0, 18: 0.55, 24: 0.1}),
    "a fifth by default": (40, {"schedule": "cooldown"}, {32: 1.0, 36: 0.55, 40: 0.1}),
    "after the warm-up": (10, {"schedule": "cooldown", "cooldown_steps": 100}, {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.55}),
    "fitted warm-up": (100, {"warmup_steps": 500}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0}),
    "too short for one": (3, {"warmup_steps": 100}, {0: 1.0}),
    "none": (10, {"warmup_steps": 0}, {0: 1.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_learning_rates_follow_the_schedule_and_never_rise_after_the_warm_up(case: str) -> None:
    total, options, expected = CASES[case]
    all_rates = rates(total, **options)
    assert {step: all_rates[step] for step in expected} == pytest.approx(expected)
    warmup = fitted_warmup(int(str(options.get("warmup_steps", 4))), total)
    after_warmup = all_rates[warmup:]
    assert after_warmup == sorted(after_warmup, reverse=True) and after_warmup[-1] >= 0.1


@pytest.mark.parametrize("schedule", ["constant", "cooldown", "wsd"])
def test_a_constant_run_can_be_prolonged_by_a_cooldown(schedule: str) -> None:
    """The learning rates of the constant phase do not depend on the schedule that follows."""
    assert rates(30, schedule=schedule, cooldown_steps=10)[:21] == rates(20, schedule="constant")
