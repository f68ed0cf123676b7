"""Compare the speeds of training programs by the points that the programs write to TensorBoard.

The programs need no timing code: each program records its loss at regular steps, and the wall times of these points
give its speed, including everything between the points.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuclip_ds.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Program:
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
    counted = [point for point in points if point.step >= warmup]
    if len(counted) < 2:
        raise UserError(f"{folder} has fewer than two points of {tag} from step {warmup} on; run more steps.")
    first = counted[0]
    last = counted[-1]
    return float((last.step - first.step) * batch / (last.wall_time - first.wall_time))


Speeds = Mapping[str, Sequence[float]]  # program -> samples/s of its runs; empty if it cannot run


def table(speeds_by_ranks: Mapping[int, Speeds], references: Sequence[str], absent: Mapping[str, str]) -> list[str]:
    """Return a Markdown table of the speeds by number of ranks, with the ratios of `references` to each program.

    A ratio is the median over the turns, in each of which all programs run once.
    """
    head = ["program", "ranks", "samples/s", "lowest - highest", *(f"{name} / it" for name in references)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for ranks, speeds in speeds_by_ranks.items():
        for name, turns in speeds.items():
            if turns:
                cells = [f"{statistics.median(turns):,.1f}", f"{min(turns):,.1f} - {max(turns):,.1f}"]
                for reference in references:
                    pairs = zip(speeds[reference], turns, strict=True)
                    ratio = statistics.median(ours / its for ours, its in pairs)
                    cells.append(f"{ratio:.2f}")
            else:
                cells = [f"not run: {absent[name]}", "-"]
                cells += ["-"] * len(references)
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return lines
