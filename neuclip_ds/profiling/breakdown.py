"""A training step's time taken apart as in FastCLIP's Tables 15-22, and its traffic by purpose.

    total = computation + pure communication + others,    communication = pure communication + overlap

Overlap is communication under which the rank also computes; others is what is neither (loading, Python, waiting for the
GPU). A rank that comes early to a collective waits in it for the last, which counts as communication; the rank that
comes last does not wait, so the shortest duration of a collective over ranks is its transfer.

`breakdown` gives the content of breakdown.json:

    steps, world_size     how many were profiled, of how many ranks
    seconds               each of COLUMNS -> mean and deviation over steps of the mean over ranks
    phases                forward, objective, backward, optimizer -> the same
    purposes              purpose -> per step and rank: calls, bytes_sent, bytes_received, seconds (two collectives at a
                          time count both), hidden_seconds (of these, under which the rank computes) and
                          transfer_seconds (without waiting)
    collectives           the same calls by purpose, op and size (bytes a rank puts in): calls and transfer_seconds a
                          step
    ranks                 for each rank and step its seconds by COLUMNS
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from neuclip_ds.profiling.intervals import Interval, intersection, length, union
from neuclip_ds.profiling.trace import Collective, StepTrace

COLUMNS = ("total", "computation", "communication", "pure_communication", "overlap", "others")
Record = dict[str, Any]


def seconds_of(step: StepTrace) -> dict[str, float]:
    """COLUMNS of one step."""
    communication = intersection(_carried_out(step.collectives), [step.window])
    total, computes, communicates = (length(part) for part in ([step.window], step.computation, communication))
    overlap = length(intersection(communication, step.computation))
    pure = communicates - overlap
    return dict(zip(COLUMNS, (total, computes, communicates, pure, overlap, total - computes - pure), strict=True))


def rank_record(steps: Sequence[StepTrace]) -> Record:
    """What a rank reports of its steps, as JSON has it."""
    return {
        "steps": [seconds_of(step) for step in steps],
        "phases": [step.phases for step in steps],
        "purposes": _by_purpose(steps),
        "collectives": [[_described(one) for one in step.collectives] for step in steps],
    }


def breakdown(ranks: Sequence[Record]) -> Record:
    """The ranks' records together."""
    steps = [rank["steps"] for rank in ranks]
    phases = [rank["phases"] for rank in ranks]
    names = {name: None for own in phases for step in own for name in step}
    names_of_purposes = {name: None for rank in ranks for name in rank["purposes"]}
    purposes = {name: _mean_of([rank["purposes"].get(name, {}) for rank in ranks]) for name in names_of_purposes}
    collectives = _by_size([rank["collectives"] for rank in ranks])
    for purpose, of in purposes.items():
        of["transfer_seconds"] = sum(one["transfer_seconds"] for one in collectives if one["purpose"] == purpose)
    return {
        "steps": len(steps[0]),
        "world_size": len(ranks),
        "seconds": {column: _over_steps(steps, column) for column in COLUMNS},
        "phases": {name: _over_steps(phases, name) for name in names},
        "purposes": purposes,
        "collectives": collectives,
        "ranks": steps,
    }


def _over_steps(ranks: Sequence[Sequence[dict[str, float]]], name: str) -> dict[str, float]:
    means = [statistics.mean(rank.get(name, 0.0) for rank in step) for step in zip(*ranks, strict=True)]
    return {"mean": statistics.mean(means), "deviation": statistics.stdev(means) if len(means) > 1 else 0.0}


def _mean_of(records: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = {key: None for record in records for key in record}
    return {key: statistics.mean(record.get(key, 0) for record in records) for key in keys}


def _by_purpose(steps: Sequence[StepTrace]) -> dict[str, dict[str, float]]:
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for step in steps:
        for one in step.collectives:
            carried_out = union(one.intervals)
            found = sums[one.purpose]
            found["calls"] += 1
            found["bytes_sent"] += one.sent
            found["bytes_received"] += one.sent
            found["seconds"] += length(carried_out)
            found["hidden_seconds"] += length(intersection(carried_out, step.computation))
    return {purpose: {key: value / len(steps) for key, value in found.items()} for purpose, found in sums.items()}


def _by_size(ranks: Sequence[Sequence[Sequence[tuple[str, str, int, float]]]]) -> list[Record]:
    """Calls and transfers by purpose, op and size; all ranks take part in the same collectives in the same order."""
    sums: defaultdict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in zip(*ranks, strict=True):
        for everyones in zip(*step, strict=False):
            found = sums[everyones[0][:3]]
            found[0] += 1
            found[1] += min(duration for *_, duration in everyones)
    steps = len(ranks[0])
    return [
        {"purpose": purpose, "op": op, "size": size, "calls": calls / steps, "transfer_seconds": seconds / steps}
        for (purpose, op, size), (calls, seconds) in sums.items()
    ]


def _described(one: Collective) -> tuple[str, str, int, float]:
    """Purpose, op, size and duration."""
    return one.purpose, one.op, one.size, length(union(one.intervals))


def _carried_out(collectives: Iterable[Collective]) -> list[Interval]:
    return union(interval for collective in collectives for interval in collective.intervals)
