"""Compare the speeds of training programs by the points that the programs write to TensorBoard.

The programs need no timing code: each program records its loss at regular steps, and the wall times of these points
give its speed, including everything between the points.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.errors import UserError


class Program(NamedTuple):
    """A training program to compare."""

    name: str
    script: Path
    options: tuple[str, ...]
    tag: str  # tag of the scalar that the program writes at regular steps
    warmup: int  # steps that are not timed
    absent: str = ""  # reason why the program cannot run here, or empty


def samples_per_second(folder: Path, tag: str, warmup: int, batch: int) -> float:
    """Return the samples/s between a scalar's first point at step `warmup` or later and its last point.

    Raises:
        UserError: there are fewer than two such points.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # seconds to import

    events = EventAccumulator(str(folder)).Reload()
    points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    counted = [(point.step, point.wall_time) for point in points if point.step >= warmup]
    if len(counted) < 2:
        raise UserError(f"{folder} has fewer than two points of {tag} from step {warmup} on; run more steps.")
    (first, began), (last, ended) = counted[0], counted[-1]
    return (last - first) * batch / (ended - began)


Speeds = Mapping[str, Sequence[float]]  # program -> samples/s of its runs; empty if it cannot run


def table(found: Mapping[int, Speeds], references: Sequence[str], absent: Mapping[str, str]) -> list[str]:
    """Return a Markdown table of the speeds by number of ranks, with the ratios of `references` to each program.

    A ratio is the median over the turns, in each of which all programs run once.
    """
    head = ["program", "ranks", "samples/s", "lowest - highest", *(f"{name} / it" for name in references)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for ranks, speeds in found.items():
        for name, turns in speeds.items():
            if not turns:
                cells = [f"not run: {absent[name]}", *["-"] * (1 + len(references))]
            else:
                pairs = [zip(speeds[reference], turns, strict=True) for reference in references]
                ratios = [statistics.median(ours / its for ours, its in of_turns) for of_turns in pairs]
                spread = f"{min(turns):,.1f} - {max(turns):,.1f}"
                cells = [f"{statistics.median(turns):,.1f}", spread, *(f"{ratio:.2f}" for ratio in ratios)]
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return lines
