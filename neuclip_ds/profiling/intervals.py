"""Unions and intersections of time intervals, and lookup of the interval that contains a time."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Interval = tuple[float, float]
T = TypeVar("T")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint, nonempty intervals in ascending order."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if disjoint and start <= disjoint[-1][1]:
            last_start, last_end = disjoint[-1]
            disjoint[-1] = (last_start, max(last_end, end))
        else:
            disjoint.append((start, end))
    return disjoint


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two results of `union`."""
    shared: list[Interval] = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        end = min(a[i][1], b[j][1])
        if start < end:
            shared.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total duration of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


class Timeline(Generic[T]):
    """Map from disjoint time intervals to values."""

    def __init__(self, entries: Iterable[tuple[Interval, T]]) -> None:
        self._entries = sorted(entries, key=lambda entry: entry[0])
        self._starts = [interval[0] for interval, _ in self._entries]

    def at(self, moment: float) -> T | None:
        """Return the value at a time, or None if no interval contains the time."""
        position = bisect_right(self._starts, moment) - 1
        if position < 0:
            return None
        (_, end), value = self._entries[position]
        return value if moment <= end else None
