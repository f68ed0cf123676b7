"""Breakdown of a training step's time, as in FastCLIP's Tables 15-22, and of its traffic by purpose.

    total = computation + pure communication + others,    communication = pure communication + overlap

Overlap is the communication time during which the rank also computes; "others" is the remaining time (loading, Python,
waiting for the GPU). A rank that reaches a collective early waits for the last rank, and this wait counts as
communication. The last rank does not wait, so a collective's shortest duration on any rank is its transfer time.

`breakdown` returns the content of breakdown.json without its labels (method, ZeRO stage, device, torch version):

    steps, world_size     number of profiled steps, number of ranks
    seconds               for each of COLUMNS: mean and standard deviation over the steps of the mean over the ranks
    phases                the same statistics for forward, objective, normalizer (in some methods), backward, optimizer
    purposes              for each purpose, per step and rank: calls, bytes_sent (equal to the bytes received), seconds
                          (summed over simultaneous collectives), hidden_seconds (the part of `seconds` during which the
                          rank computes) and transfer_seconds (without waiting)
    collectives           calls and transfer_seconds per step, by purpose, op and size (bytes of a rank's input)
    ranks                 for each rank and step: the seconds for each of COLUMNS
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from neuclip_ds.profiling.intervals import Interval, intersection, length, union
from neuclip_ds.profiling.trace import Collective, StepTrace

COLUMNS = ("total", "computation", "communication", "pure_communication", "overlap", "others")
Record = dict[str, Any]
_LABELS = {"method": "method", "zero_stage": "ZeRO", "world_size": "ranks"}
_TIMES_HEADER = [*_LABELS.values(), "steps", *(column.replace("_", " ") for column in COLUMNS)]
_TRAFFIC_HEADER = [*_LABELS.values(), "purpose", "calls", "kB", "ms", "without waiting", "hidden"]


def step_seconds(step: StepTrace) -> dict[str, float]:
    """Return one step's time, in seconds, for each of COLUMNS."""
    executed: list[Interval] = []
    for collective in step.collectives:
        executed += collective.intervals
    communication = intersection(union(executed), [step.window])
    total = length([step.window])
    computation = length(step.computation)
    overlap = length(intersection(communication, step.computation))
    pure_communication = length(communication) - overlap
    return {
        "total": total,
        "computation": computation,
        "communication": length(communication),
        "pure_communication": pure_communication,
        "overlap": overlap,
        "others": total - computation - pure_communication,
    }


def rank_record(steps: Sequence[StepTrace]) -> Record:
    """Return the times, phases and collectives of a rank's steps in a JSON-serializable form."""
    collectives_of_steps = []
    for step in steps:
        collectives_of_steps.append([_collective_record(collective, step) for collective in step.collectives])
    return {
        "steps": [step_seconds(step) for step in steps],
        "phases": [step.phases for step in steps],
        "collectives": collectives_of_steps,
    }


def _collective_record(collective: Collective, step: StepTrace) -> Record:
    executed = union(collective.intervals)
    return {
        "purpose": collective.purpose,
        "op": collective.op,
        "size": collective.size,
        "bytes_sent": collective.sent,
        "seconds": length(executed),
        "hidden_seconds": length(intersection(executed, step.computation)),
    }


def breakdown(ranks: Sequence[Record]) -> Record:
    """Combine the records of all ranks into the content of breakdown.json."""
    steps = [rank["steps"] for rank in ranks]
    phases = [rank["phases"] for rank in ranks]
    phase_names: dict[str, None] = {}  # a set in order of first appearance
    for rank in phases:
        for step in rank:
            phase_names.update(dict.fromkeys(step))
    collectives_by_rank = [rank["collectives"] for rank in ranks]
    purposes = _by_purpose(collectives_by_rank)
    collectives = _by_size(collectives_by_rank)
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
    """Return the mean and the standard deviation, over steps, of a value's mean over ranks."""
    means = []
    for step_of_ranks in zip(*ranks, strict=True):
        means.append(statistics.mean(step.get(name, 0.0) for step in step_of_ranks))
    return {"mean": statistics.mean(means), "deviation": statistics.stdev(means) if len(means) > 1 else 0.0}


def _by_purpose(ranks: Sequence[Sequence[Sequence[Record]]]) -> dict[str, dict[str, float]]:
    """Return the calls, bytes and times of each purpose, averaged over steps and ranks.

    Args:
        ranks: the records of collectives by rank and step.
    """
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    step_count = 0
    for steps in ranks:
        for collectives in steps:
            step_count += 1
            for record in collectives:
                sums_of_purpose = sums[record["purpose"]]
                sums_of_purpose["calls"] += 1
                for key in ("bytes_sent", "seconds", "hidden_seconds"):
                    sums_of_purpose[key] += record[key]
    averages = {}
    for purpose, sums_of_purpose in sums.items():
        averages[purpose] = {key: value / step_count for key, value in sums_of_purpose.items()}
    return averages


def _by_size(ranks: Sequence[Sequence[Sequence[Record]]]) -> list[Record]:
    """Return calls and transfer times by purpose, op and size; all ranks must run collectives in the same order.

    Args:
        ranks: the records of collectives by rank and step.
    """
    calls: Counter[tuple[str, str, int]] = Counter()
    transfer_seconds: Counter[tuple[str, str, int]] = Counter()
    for step_of_ranks in zip(*ranks, strict=True):
        for same_collective in zip(*step_of_ranks, strict=False):  # on every rank
            first = same_collective[0]
            key = (first["purpose"], first["op"], first["size"])
            calls[key] += 1
            transfer_seconds[key] += min(record["seconds"] for record in same_collective)
    steps = len(ranks[0])
    records = []
    for key, count in calls.items():
        purpose, op, size = key
        records.append(
            {
                "purpose": purpose,
                "op": op,
                "size": size,
                "calls": count / steps,
                "transfer_seconds": transfer_seconds[key] / steps,
            }
        )
    return records


def report(breakdowns: Sequence[Record]) -> str:
    """Return tables of times (as in FastCLIP's Tables 15-22) and traffic from the contents of breakdown.json files."""
    time_rows = []
    traffic_rows: list[list[str]] = []
    for record in breakdowns:
        row = [*_label_cells(record), str(record["steps"])]
        for column in COLUMNS:
            statistic = record["seconds"][column]
            row.append(f"{1e3 * statistic['mean']:.1f} ± {1e3 * statistic['deviation']:.1f}")
        time_rows.append(row)
        traffic_rows += _traffic_rows(record)
    return (
        f"## Time of a step, ms (mean and deviation over steps)\n\n{_table(_TIMES_HEADER, time_rows)}\n"
        f"## Collectives per step and rank by purpose\n\n{_table(_TRAFFIC_HEADER, traffic_rows)}"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    separator = ["---"] * len(header)
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, separator, *rows])


def _traffic_rows(record: Record) -> list[list[str]]:
    """Return table rows of calls, bytes and times for each purpose."""
    rows = []
    for purpose, values in record["purposes"].items():
        hidden = f"{values['hidden_seconds'] / values['seconds']:.0%}" if values["seconds"] else "-"
        rows.append(
            [
                *_label_cells(record),
                purpose,
                f"{values['calls']:g}",
                f"{values['bytes_sent'] / 1e3:,.3f}",
                f"{1e3 * values['seconds']:.2f}",
                f"{1e3 * values['transfer_seconds']:.2f}",
                hidden,
            ]
        )
    return rows


def _label_cells(record: Record) -> list[str]:
    return [str(record.get(label, "-")) for label in _LABELS]
