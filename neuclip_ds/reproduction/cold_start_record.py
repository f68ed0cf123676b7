"""What the cold-start study keeps of its runs: a line of JSON for each, from which its tables are made."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.errors import UserError
from neuclip_ds.reproduction.report import mean_recall
from neuclip_ds.reproduction.runner import Curve, Results
from neuclip_ds.reproduction.study import Job, Options

_KEPT = ("step_ms", "normalizer_mse")


class Record(NamedTuple):
    """A run, or a measurement on what runs have left; without evaluations where it diverged."""

    name: str
    seed: int
    options: Options
    scores: Mapping[str, float]
    step: Sequence[int] = ()  # of its evaluations
    recall: Sequence[float] = ()  # percent, at these steps
    zero_shot: Sequence[float] = ()


def record_of(job: Job, results: Results, curve: Curve, folder: Path) -> Record:
    """Return the record of a run; its options name files relative to the study's folder."""
    evaluated = curve if results else []
    return Record(
        job.name,
        job.seed,
        {name: _plain(value, folder) for name, value in {**job.options, "data.train": job.train}.items()},
        {name: results[name] for name in _KEPT if name in results},
        [step for step, _ in evaluated],
        [round(mean_recall(point), 3) for _, point in evaluated],
        [round(100 * point.get("zero_shot_top1", 0.0), 3) for _, point in evaluated],
    )


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a line for each record."""
    lines = (json.dumps({name: value for name, value in record._asdict().items() if value}) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Read what `write_records` wrote.

    Raises:
        UserError: there is no such file, or a line of it is no record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Record(**{"seed": 0, "options": {}, "scores": {}, **json.loads(line)}) for line in lines]
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds no records of the study ({error}); name a file that it wrote.") from error


def _plain(value: Any, folder: Path) -> Any:
    return str(value.relative_to(folder)) if isinstance(value, Path) else value
