"""Loss spikes: detected once with their level, never in noise, drift or a falling curve."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from neuclip_ds.reporting.loss_spikes import LossSpikeDetector, Spike


def curve(steps: int = 2000, seed: int = 0) -> NDArray[np.float64]:
    """Falls from 8 to 2, with noise."""
    noise = np.random.default_rng(seed).normal(0, 0.03, steps)
    return 2 + 6 * np.exp(-np.arange(steps) / 150) + noise


def found_in(losses: NDArray[np.float64]) -> list[tuple[int, Spike]]:
    detector = LossSpikeDetector()
    found = [(step, detector.update(float(loss))) for step, loss in enumerate(losses, start=1)]
    return [(step, spike) for step, spike in found if spike is not None]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike(seed: int) -> None:
    assert found_in(curve(seed=seed)) == []
    assert found_in(-curve(seed=seed)[::-1] / 100) == []  # losses may be negative and rise slowly


def test_heavy_tails_and_a_constant_loss_are_no_spikes() -> None:
    noise = np.random.default_rng(1).laplace(0, 0.03, 2000)
    assert found_in(3 + noise) == []
    assert found_in(np.full(500, 4.852)) == []
    assert found_in(4.852 + np.where(np.arange(500) % 7 == 0, 1e-4, 0)) == []  # hardly any deviation of its own


def test_a_spike_is_detected_once_and_so_is_its_end() -> None:
    losses = curve()
    losses[1499:1503] += [2.0, 3.0, 1.0, 0.9]
    (first, spike), (last, end) = found_in(losses)
    assert (first, spike.kind) == (1500, "loss_spike")
    assert spike.level == pytest.approx(2.0, abs=0.03)
    assert spike.deviation == pytest.approx(0.03, rel=0.3)
    assert (last, end.kind, end.steps) == (1523, "loss_back", 4)  # twenty calm steps after the last one above


def test_an_oscillating_spike_is_one() -> None:
    losses = curve()
    losses[1000:1100:10] += 2.0
    assert [(step, spike.kind) for step, spike in found_in(losses)] == [(1001, "loss_spike"), (1111, "loss_back")]


def test_a_loss_that_stays_up_becomes_the_level() -> None:
    losses = curve()
    losses[1000:] += 3.0
    losses[1600] += 3.0
    kinds = [(step, spike.kind) for step, spike in found_in(losses)]
    assert kinds == [(1001, "loss_spike"), (1200, "loss_stays"), (1601, "loss_spike"), (1621, "loss_back")]
