"""Data stalls: long waits and a slow loader, each reported once; the first step is ignored."""

from __future__ import annotations

import pytest

from neuclip_ds.reporting.stalls import Stall, StallDetector


def found_in(steps: list[tuple[float, float]]) -> list[tuple[int, Stall]]:
    detector = StallDetector()
    return [(number, stall) for number, times in enumerate(steps, start=1) for stall in detector.update(*times)]


def test_a_stall_is_reported_with_its_share_and_the_usual_step() -> None:
    steps = [(0.01, 0.5)] * 40
    steps[29] = (7.5, 8.0)
    ((number, stall),) = found_in(steps)
    assert (number, stall.kind, stall.waited, stall.usual) == (30, "data_stall", 7.5, 0.5)
    assert stall.share == pytest.approx(0.94, abs=0.01)


@pytest.mark.parametrize(
    "steps",
    [
        [(30.0, 31.0)] + [(0.01, 0.5)] * 50,  # worker processes start
        [(0.01, 0.5)] * 20 + [(1.5, 2.0)] + [(0.01, 0.5)] * 20,  # shorter than the least stall
        [(1.0, 10.0)] * 20 + [(6.0, 16.0)] + [(1.0, 10.0)] * 20,  # less than a usual step
        [(0.0, 0.2)] * 20 + [(0.0, 60.0)] * 3,  # slow, but not the loader
    ],
)
def test_what_is_no_stall(steps: list[tuple[float, float]]) -> None:
    assert found_in(steps) == []


def test_a_slow_loader_is_reported_when_it_begins_and_ends() -> None:
    fast, slow = [(0.02, 1.0)] * 120, [(0.3, 1.0)] * 180
    found = found_in([(0.0, 1.0), *fast, *slow, *fast, *fast])
    assert [(number, stall.kind) for number, stall in found] == [(181, "data_slow"), (361, "data_fast")]
    assert found[0][1].share == pytest.approx(0.3)
    assert (found[0][1].steps, found[0][1].seconds) == (60, pytest.approx(60))
