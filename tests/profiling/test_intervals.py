"""Unions and intersections of intervals against sets of moments."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from neuclip_ds.profiling.intervals import Interval, Timeline, intersection, length, union

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))))


def moments(intervals: list[Interval]) -> set[int]:
    """Return the unit steps that intervals with integer ends cover."""
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_moments(a: list[Interval], b: list[Interval]) -> None:
    first, second = union(a), union(b)
    assert moments(first) == moments(a) and length(first) == len(moments(a))
    assert all(early[1] < late[0] for early, late in itertools.pairwise(first)), "disjoint and ascending"
    both = intersection(first, second)
    assert moments(both) == moments(a) & moments(b) and length(both) == len(moments(a) & moments(b))


def test_value_at_a_moment() -> None:
    timeline = Timeline([((5.0, 7.0), "backward"), ((1.0, 4.0), "forward")])
    found = {moment: timeline.at(moment) for moment in (0.0, 1.0, 4.0, 4.5, 6.0, 8.0)}
    assert found == {0.0: None, 1.0: "forward", 4.0: "forward", 4.5: None, 6.0: "backward", 8.0: None}
