"""Paired differences against a worked example."""

from __future__ import annotations

import pytest

from neuclip_ds.reproduction.paired import difference


def test_against_a_t_table() -> None:
    found = difference([3.0, 5.0, 4.0], [1.0, 4.0, 4.0])  # gains 2, 1, 0: mean 1, deviation 1
    assert found.mean == 1.0
    assert found.half_width == pytest.approx(4.303 / 3**0.5, abs=1e-3)  # t of 0.975 with 2 degrees of freedom
    assert not found.clear
    assert str(found) == "+1.00 ± 2.48"


def test_equal_gains_are_clear() -> None:
    assert difference([2.0, 3.0], [1.0, 2.0]).clear


def test_one_pair_shows_nothing() -> None:
    found = difference([2.0], [1.0])
    assert not found.clear
    assert str(found) == "+1.00"


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        difference([], [])
