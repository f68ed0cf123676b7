"""DataComp's tasks (datacomp.yaml), their folders on disk, and published scores (published.yaml)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

DATACOMP = "datacomp"  # the average of all tasks
_FILES = Path(__file__).parent


class GroupRule(BaseModel):
    """Accuracies per group, which a column of the npy member gives."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    field: str
    column: int
    worst: str  # name of the smallest accuracy
    accuracy: str = "acc"  # prefix of the other accuracies' names
    top: Literal[1, 5] = 1


class Task(BaseModel):
    """Entry of datacomp.yaml, which explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    name: str
    folder: str
    source: str
    size: int
    kind: Literal["classification", "retrieval", "winogavil"] = "classification"
    metric: str = "acc1"
    f1: bool = False
    groups: tuple[GroupRule, ...] = ()
    averages: tuple[str, ...] = ()

    def find(self, root: Path) -> Path | None:
        """Return its folder below `root`, None where there is none."""
        names = (self.folder, self.folder.removesuffix("_test"))
        return next((root / name for name in names if (root / name).is_dir()), None)


class TaskList(BaseModel):
    """Content of datacomp.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    averages: dict[str, str]  # name -> description
    tasks: tuple[Task, ...]

    def choose(self, names: Sequence[str]) -> list[Task]:
        """Return the tasks with these names, keys or patterns such as imagenet*, in the list's order; of none, all.

        Raises:
            UserError: a name matches no task.
        """
        for name in names:
            if not any(_fits(task, name) for task in self.tasks):
                known = ", ".join(task.key for task in self.tasks)
                raise UserError(f"There is no task {name}; the tasks are {known}.")
        return [task for task in self.tasks if not names or any(_fits(task, name) for name in names)]

    def on_disk(self, root: Path, names: Sequence[str] = ()) -> list[tuple[Task, Path]]:
        """Return the tasks with these names and their folders; of none, all on disk, the others being logged.

        Raises:
            UserError: no task is on disk, or one that was named is not.
        """
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; name the one that holds the evaluation sets' folders.")
        chosen = self.choose(names)
        folders = {task.key: task.find(root) for task in chosen}
        missing = [task for task in chosen if folders[task.key] is None]
        if len(missing) == len(chosen) or (names and missing):
            named = ", ".join(f"{task.name} ({task.folder})" for task in missing)
            raise UserError(f"Not found below {root}: {named}; docs/reference/evaluation.md lists where to get them.")
        if missing:
            log.warning("not found below %s, and skipped: %s", root, ", ".join(task.name for task in missing))
        return [(task, folder) for task in chosen if (folder := folders[task.key]) is not None]

    def in_average(self, average: str) -> list[Task]:
        """Return the tasks whose scores enter an average."""
        return [task for task in self.tasks if average == DATACOMP or average in task.averages]


def _fits(task: Task, name: str) -> bool:
    return any(fnmatch(known.lower(), name.lower()) for known in (task.key, task.name, task.folder))


def load_tasks() -> TaskList:
    """Read datacomp.yaml."""
    return TaskList.model_validate(yaml.safe_load((_FILES / "datacomp.yaml").read_text(encoding="utf-8")))


class PublishedScores(BaseModel):
    """Entry of published.yaml, which explains the fields: tables of one source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    scores: tuple[str, ...]
    percent: dict[str, dict[str, tuple[float | tuple[float, float], ...]]]

    @model_validator(mode="after")
    def _rows_are_full(self) -> PublishedScores:
        for setting, rows in self.percent.items():
            if short := [row for row, values in rows.items() if len(values) != len(self.scores)]:
                raise ValueError(f"{self.source}, {setting}: {short} need {len(self.scores)} values each")
        return self


def published_scores() -> list[PublishedScores]:
    """Read published.yaml."""
    entries = yaml.safe_load((_FILES / "published.yaml").read_text(encoding="utf-8"))
    return [PublishedScores.model_validate(entry) for entry in entries]
