"""The queue's normaliser carries a perturbation of the features no further than OpenCLIP's loss, at any temperature."""

from __future__ import annotations

import pytest
from benchmark_perturbation import VARIANTS, growth


@pytest.mark.parametrize("tau", [0.05, 0.02, 0.01])
def test_growth(tau: float) -> None:
    ours, theirs = (growth(VARIANTS[name], tau, steps=12) for name in ("neuclip_queue", "openclip"))
    assert 1 < ours < 1.2 * theirs
