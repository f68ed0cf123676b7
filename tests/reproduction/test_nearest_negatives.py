"""Similarities of the nearest negatives, on features whose similarities are known."""

from __future__ import annotations

import pytest
import torch

from neuclip_ds.reproduction.nearest_negatives import nearest_negatives


def test_positive_and_ranks() -> None:
    n = 101
    angles = torch.arange(n, dtype=torch.float64) / n
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    found = nearest_negatives(features, features)
    scores = [sorted((torch.cos(a - angles[angles != a])).tolist(), reverse=True) for a in angles]
    nearest = torch.tensor([row[:5] for row in scores], dtype=torch.float64)
    assert found.positive == pytest.approx(1.0)
    assert found.nearest == pytest.approx(float(nearest.mean()))
    assert found.nearest_deviation == pytest.approx(float(nearest.std()))
    assert found.far == pytest.approx(float(torch.tensor([row[89:100] for row in scores]).mean()), rel=1e-6)
