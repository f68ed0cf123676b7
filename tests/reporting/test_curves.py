"""Long curves made readable: bins with their spread, a smooth line, and no outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from neuclip_ds.reporting.curves import limits, summarize


def test_few_points_are_drawn_as_they_are():
    curve = summarize([1, 2, 3], [3.0, 1.0, 2.0])
    assert curve is not None
    assert curve.steps.tolist() == [1, 2, 3]
    assert curve.line.tolist() == curve.low.tolist() == curve.high.tolist() == [3, 1, 2]
    assert curve.window == 1


def test_many_points_become_bins_that_keep_their_extremes_and_mean():
    noise = np.random.default_rng(0).standard_normal(15_000)
    values = np.linspace(5, 1, 15_000) + noise
    values[7_000] = 50
    curve = summarize(range(10, 150_010, 10), values.tolist())
    assert curve is not None
    assert len(curve.steps) == 400
    assert (curve.high.max(), curve.low.min()) == (50, values.min())
    assert np.abs(np.delete(curve.line - np.linspace(5, 1, 400), slice(180, 195))).max() < 1, "the noise is gone"
    assert 300 < curve.window < 500


def test_a_straight_line_stays_one_to_its_ends():
    curve = summarize(range(300), np.arange(300.0).tolist())
    assert curve is not None
    assert curve.window > 1
    np.testing.assert_allclose(curve.line, np.arange(300))


def test_what_cannot_be_drawn_is_left_out():
    curve = summarize([1, 2, 3, 4], [math.nan, 1.0, math.inf, 2.0])
    assert curve is not None
    assert curve.steps.tolist() == [2, 4]
    curve = summarize([1, 2], [0.0, 4.0], log_scale=True)
    assert curve is not None
    assert curve.line.tolist() == pytest.approx([4.0])
    assert summarize([1], [math.nan]) is None


def test_far_outliers_do_not_flatten_a_plot():
    values = np.random.default_rng(0).random(15_000)
    calm = summarize(range(15_000), values.tolist())
    values[50] = 1e6
    spiky = summarize(range(15_000), values.tolist())
    assert calm is not None and spiky is not None
    assert limits([calm]) is None
    bounds = limits([calm, spiky])
    assert bounds is not None
    assert -0.2 < bounds[0] < 0.1 and 0.9 < bounds[1] < 1.2
