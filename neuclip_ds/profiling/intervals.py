"""Unions and intersections of time intervals, and lookup of the interval that contains a time."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Interval = tuple[float, float]
T = TypeVar("T")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint, nonempty intervals in ascending order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two results of `union`."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


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
        place = bisect_right(self._starts, moment) - 1
        if place < 0 or self._entries[place][0][1] < moment:
            return None
        return self._entries[place][1]
