"""Compare the speeds of training programs by the points that the programs write to TensorBoard.

The programs need no timing code: each program records its loss at regular steps, and the wall times of these points
give its speed, including everything between the points.
"""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    packages: tuple[str, ...] = ()  # folders of modules that replace installed ones
    absent: str = ""  # reason why the program cannot run here, or empty


@dataclass(kw_only=True)
class Measured:
    """Speeds of a program on one kind of input, with one number of ranks and of pairs per rank."""

    source: str  # input, as in the table
    program: str
    ranks: int
    rows: int  # pairs per rank
    speeds: dict[int, float] = field(default_factory=dict)  # samples/s by turn
    launches: int | None = None  # of one step, if counted
    problem: str = ""  # why turns are missing, or empty
    failed: bool = False  # whether the problem is an error of the program

    @property
    def group(self) -> tuple[str, int, int]:
        """Input, number of ranks and pairs per rank, which must be equal for two speeds to be compared."""
        return self.source, self.ranks, self.rows


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
        raise UserError(
            f"{folder} contains fewer than two TensorBoard points of {tag} from step {warmup} on: raise "
            "--steps, or lower --log-every."
        )
    first = counted[0]
    last = counted[-1]
    return float((last.step - first.step) * batch / (last.wall_time - first.wall_time))


def rows_of_table(measured: Sequence[Measured], references: Sequence[str], launches: str) -> list[list[str]]:
    """Return the header and the rows of the speed table, with the ratios of `references` to each program.

    A ratio is the median over the turns in which both programs ran, with the same input, ranks and pairs per rank.

    Args:
        measured: the programs.
        references: names of programs.
        launches: name of the last column.
    """
    head = ["input", "program", "ranks", "pairs per rank", "samples/s", "lowest", "highest"]
    head += [f"{name} / this row" for name in references]
    rows = [[*head, launches]]
    by_name = {(*entry.group, entry.program): entry for entry in measured}
    for entry in measured:
        row = [entry.source, entry.program, str(entry.ranks), str(entry.rows)]
        if entry.speeds:
            speeds = list(entry.speeds.values())
            row += [f"{value:.1f}" for value in (statistics.median(speeds), min(speeds), max(speeds))]
        else:
            row += ["failed" if entry.failed else f"not run: {entry.problem}", "-", "-"]
        for name in references:
            reference = by_name.get((*entry.group, name))
            row.append("-" if reference is None else _ratio(reference, entry))
        row.append("-" if entry.launches is None else str(entry.launches))
        rows.append(row)
    return rows


def _ratio(reference: Measured, entry: Measured) -> str:
    turns = reference.speeds.keys() & entry.speeds.keys()
    if not turns:
        return "-"
    ratio = statistics.median(reference.speeds[turn] / entry.speeds[turn] for turn in turns)
    return f"{ratio:.2f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first of `rows` is the header."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def write_csv(path: Path, description: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table below the lines of its description, as in tools/measurements."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in description)
        csv.writer(file, lineterminator="\n").writerows(rows)
