"""Breakdown of a training step's time, as in FastCLIP's Tables 15-22, and of its traffic by purpose.

    total = computation + pure communication + others,    communication = pure communication + overlap

Overlap is the communication time during which the rank also computes; "others" is the remaining time (loading, Python,
waiting for the GPU). A rank that reaches a collective early waits for the last rank, and this wait counts as
communication. The last rank does not wait, so a collective's shortest duration on any rank is its transfer time.

`breakdown` returns the content of breakdown.json:

    steps, world_size     number of profiled steps, number of ranks
    seconds               for each of COLUMNS: mean and standard deviation over the steps of the mean over the ranks
    phases                the same statistics for forward, objective, normalizer, backward and optimizer
    purposes              for each purpose, per step and rank: calls, bytes_sent (equal to the bytes received), seconds
                          (summed over simultaneous collectives), hidden_seconds (the part of `seconds` during which the
                          rank computes) and transfer_seconds (without waiting)
    collectives           calls and transfer_seconds per step, by purpose, op and size (bytes of a rank's input)
    ranks                 for each rank and step: the seconds for each of COLUMNS
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from neuclip_ds.profiling.intervals import intersection, length, union
from neuclip_ds.profiling.trace import Collective, StepTrace

COLUMNS = ("total", "computation", "communication", "pure_communication", "overlap", "others")
Record = dict[str, Any]
_LABELS = {"method": "method", "zero_stage": "ZeRO", "world_size": "ranks"}
_TIMES = [*_LABELS.values(), "steps", *(column.replace("_", " ") for column in COLUMNS)]
_TRAFFIC = [*_LABELS.values(), "purpose", "calls", "kB", "ms", "without waiting", "hidden"]


def step_seconds(step: StepTrace) -> dict[str, float]:
    """Return one step's time, in seconds, for each of COLUMNS."""
    executed = union(interval for collective in step.collectives for interval in collective.intervals)
    communication = intersection(executed, [step.window])
    total, computes, communicates = (length(part) for part in ([step.window], step.computation, communication))
    overlap = length(intersection(communication, step.computation))
    pure = communicates - overlap
    return dict(zip(COLUMNS, (total, computes, communicates, pure, overlap, total - computes - pure), strict=True))


def rank_record(steps: Sequence[StepTrace]) -> Record:
    """Return the times, phases and collectives of a rank's steps in a JSON-serializable form."""
    return {
        "steps": [step_seconds(step) for step in steps],
        "phases": [step.phases for step in steps],
        "collectives": [[_collective(one, step) for one in step.collectives] for step in steps],
    }


def _collective(one: Collective, step: StepTrace) -> list[Any]:
    executed = union(one.intervals)
    hidden = length(intersection(executed, step.computation))
    return [one.purpose, one.op, one.size, one.sent, length(executed), hidden]


def breakdown(ranks: Sequence[Record]) -> Record:
    """Combine the records of all ranks into the content of breakdown.json."""
    steps, phases = ([rank[part] for rank in ranks] for part in ("steps", "phases"))
    phase_names = {name: None for rank in phases for step in rank for name in step}
    purposes = _by_purpose([rank["collectives"] for rank in ranks])
    collectives = _by_size([rank["collectives"] for rank in ranks])
    for purpose, values in purposes.items():
        values["transfer_seconds"] = sum(one["transfer_seconds"] for one in collectives if one["purpose"] == purpose)
    return {
        "steps": len(steps[0]),
        "world_size": len(ranks),
        "seconds": {column: _over_steps(steps, column) for column in COLUMNS},
        "phases": {name: _over_steps(phases, name) for name in phase_names},
        "purposes": purposes,
        "collectives": collectives,
        "ranks": steps,
    }


def _over_steps(ranks: Sequence[Sequence[dict[str, float]]], name: str) -> dict[str, float]:
    means = [statistics.mean(rank.get(name, 0.0) for rank in step) for step in zip(*ranks, strict=True)]
    return {"mean": statistics.mean(means), "deviation": statistics.stdev(means) if len(means) > 1 else 0.0}


def _by_purpose(ranks: Sequence[Sequence[Sequence[Sequence[Any]]]]) -> dict[str, dict[str, float]]:
    """Return the calls, bytes and times of each purpose, averaged over steps and ranks."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    steps = [step for rank in ranks for step in rank]
    for purpose, _, _, sent, seconds, hidden in chain.from_iterable(steps):
        times = {"seconds": seconds, "hidden_seconds": hidden}
        sums[purpose].update({"calls": 1, "bytes_sent": sent, **times})
    return {purpose: {key: value / len(steps) for key, value in found.items()} for purpose, found in sums.items()}


def _by_size(ranks: Sequence[Sequence[Sequence[Sequence[Any]]]]) -> list[Record]:
    """Return calls and transfer times by purpose, op and size; all ranks must run collectives in the same order."""
    sums: defaultdict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in zip(*ranks, strict=True):
        for collective in zip(*step, strict=False):  # the same collective on every rank
            purpose, op, size = collective[0][:3]
            found = sums[purpose, op, size]
            found[0] += 1
            found[1] += min(one[4] for one in collective)
    steps = len(ranks[0])
    return [
        {"purpose": purpose, "op": op, "size": size, "calls": calls / steps, "transfer_seconds": seconds / steps}
        for (purpose, op, size), (calls, seconds) in sums.items()
    ]


def report(breakdowns: Sequence[Record]) -> str:
    """Return tables of times (as in FastCLIP's Tables 15-22) and traffic from the contents of breakdown.json files."""
    times = []
    for found in breakdowns:
        seconds = (found["seconds"][column] for column in COLUMNS)
        cells = (f"{1e3 * of['mean']:.1f} ± {1e3 * of['deviation']:.1f}" for of in seconds)
        times.append([*_labels(found), str(found["steps"]), *cells])
    return (
        f"## Time of a step, ms (mean and deviation over steps)\n\n{_table(_TIMES, times)}\n"
        "## Collectives per step and rank by purpose\n\n"
        + _table(_TRAFFIC, (row for found in breakdowns for row in _traffic(found)))
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def _traffic(found: Record) -> Iterator[list[str]]:
    """Yield a table row of calls, bytes and times for each purpose."""
    for purpose, values in found["purposes"].items():
        counts = f"{values['calls']:g}", f"{values['bytes_sent'] / 1e3:,.3f}"
        milliseconds = (f"{1e3 * values[key]:.2f}" for key in ("seconds", "transfer_seconds"))
        hidden = f"{values['hidden_seconds'] / values['seconds']:.0%}" if values["seconds"] else "-"
        yield [*_labels(found), purpose, *counts, *milliseconds, hidden]


def _labels(found: Record) -> list[str]:
    return [str(found.get(label, "-")) for label in _LABELS]
