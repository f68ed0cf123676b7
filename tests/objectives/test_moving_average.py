"""gamma's schedule and the update of u in the log domain."""

from __future__ import annotations

import math

import pytest
import torch

from neuclip_ds.config import MovingAverageConfig
from neuclip_ds.objectives.normalizers.moving_average import cosine_gamma, moving_average


def test_gamma_falls_from_one_to_its_minimum() -> None:
    config = MovingAverageConfig(gamma_min=0.2, gamma_epochs=4)
    found = [cosine_gamma(epoch, config) for epoch in range(6)]
    assert found == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2])


def test_constant_gamma_is_a_schedule_of_no_epochs() -> None:
    config = MovingAverageConfig(gamma_min=0.6, gamma_epochs=0)
    assert cosine_gamma(0, config) == cosine_gamma(7, config) == 0.6


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
