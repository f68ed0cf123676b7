"""Compare training programs: in fresh processes, interleaved, timed by the points that they write to TensorBoard.

The programs need no timing code: each records its loss at regular steps, and the wall times of those points give its
speed, including everything in between.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.errors import UserError


class Program(NamedTuple):
    """A training program."""

    name: str
    script: Path
    options: tuple[str, ...]
    tag: str  # tag of the scalar that it writes at regular steps
    warmup: int  # steps that are not timed
    absent: str = ""  # why it cannot run here; empty if it can


def samples_per_second(folder: Path, tag: str, warmup: int, batch: int) -> float:
    """Return the speed between the first point of a scalar from step `warmup` on and the last one.

    Raises:
        UserError: there are fewer than two such points.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # seconds to import

    events = EventAccumulator(str(folder)).Reload()
    points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    counted = [(point.step, point.wall_time) for point in points if point.step >= warmup]
    if len(counted) < 2:
        raise UserError(f"{folder} holds fewer than two points of {tag} from step {warmup} on; ask for more steps.")
    (first, began), (last, ended) = counted[0], counted[-1]
    return (last - first) * batch / (ended - began)


Speeds = Mapping[str, Sequence[float]]  # program -> samples/s of its runs; none if it cannot run


def table(found: Mapping[int, Speeds], references: Sequence[str], absent: Mapping[str, str]) -> list[str]:
    """Return lines of a Markdown table of the speeds by number of ranks, with `references` divided by each program.

    A ratio is the median of the ratios of the turns; all programs run once in each turn.
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
