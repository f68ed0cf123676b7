"""gamma's schedule and the update of u in the log domain."""

from __future__ import annotations

import math

import pytest
import torch
from build import step

from neuclip_ds.objectives.normalizers.moving_average import gamma_of, moving_average
from neuclip_ds.objectives.sogclr_family import MovingAverageConfig


def test_gamma_falls_from_one_to_its_minimum() -> None:
    config = MovingAverageConfig(gamma_min=0.2, gamma_epochs=4)
    found = [gamma_of(step(epoch, epoch), config) for epoch in range(6)]
    assert found == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2])


def test_constant_gamma() -> None:
    config = MovingAverageConfig(gamma="constant", gamma_min=0.6)
    assert gamma_of(step(0, 0), config) == gamma_of(step(90, 30), config) == 0.6


def test_gamma_of_a_run_within_one_epoch() -> None:
    """Ten steps count as an epoch: the schedule goes through its four values though the data's epoch stays 0."""
    config = MovingAverageConfig(gamma_min=0.2, gamma_epochs=4, gamma_epoch_steps=10)
    found = [gamma_of(step(number, 0), config) for number in (0, 9, 10, 20, 39, 40)]
    assert found == pytest.approx([1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2])


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.01])
def test_update_equals_the_linear_formula(gamma: float) -> None:
    u, g = torch.rand(2, 50, dtype=torch.float64)
    found = moving_average(u.log(), g.log(), gamma).exp()
    torch.testing.assert_close(found, (1 - gamma) * u + gamma * g)


def test_first_visit_takes_the_batch_value() -> None:
    log_g = torch.tensor([3.0, -120.0])
    assert torch.equal(moving_average(torch.full((2,), -math.inf), log_g, 0.2), log_g)


def test_values_beyond_float32_range_of_exp() -> None:
    found = moving_average(torch.tensor([150.0]), torch.tensor([190.0]), 0.5)
    assert float(found) == pytest.approx(190 + math.log(0.5))
