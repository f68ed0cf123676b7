"""The tasks of DataComp as data (datacomp.yaml), and where each lies on disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

DATACOMP = "datacomp"  # the average of all tasks
_FILES = Path(__file__).parent


class GroupRule(BaseModel):
    """Accuracies by a column of the npy member."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    field: str
    column: int
    worst: str  # name of the smallest
    accuracy: str = "acc"  # what the names of the others begin with
    top: Literal[1, 5] = 1


class Task(BaseModel):
    """An entry of datacomp.yaml, where the fields are explained."""

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
        """Its folder below `root`, None where it is not on disk."""
        names = (self.folder, self.folder.removesuffix("_test"))
        return next((root / name for name in names if (root / name).is_dir()), None)


class TaskList(BaseModel):
    """datacomp.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    averages: dict[str, str]  # name -> of what
    tasks: tuple[Task, ...]

    def choose(self, names: Sequence[str]) -> list[Task]:
        """The tasks of these names, keys or patterns such as imagenet*, in the list's order; of none, all.

        Raises:
            UserError: a name fits no task.
        """
        unknown = [name for name in names if not any(_fits(task, name) for task in self.tasks)]
        if unknown:
            known = ", ".join(task.key for task in self.tasks)
            raise UserError(f"There is no task {unknown[0]}; the tasks are {known}.")
        return [task for task in self.tasks if not names or any(_fits(task, name) for name in names)]

    def on_disk(self, root: Path, names: Sequence[str] = ()) -> list[tuple[Task, Path]]:
        """The tasks of these names and their folders; of none, all that are there, the others being logged.

        Raises:
            UserError: there is none, or one that was named is missing.
        """
        if not root.is_dir():
            raise UserError(f"{root} is no folder; name the one that holds the evaluation sets' folders.")
        chosen = self.choose(names)
        places = {task.key: task.find(root) for task in chosen}
        missing = [task for task in chosen if places[task.key] is None]
        if len(missing) == len(chosen) or (names and missing):
            named = ", ".join(f"{task.name} ({task.folder})" for task in missing)
            raise UserError(f"Not below {root}: {named}; docs/evaluation.md says where to get them.")
        if missing:
            log.warning("not below %s and left out: %s", root, ", ".join(task.name for task in missing))
        return [(task, place) for task in chosen if (place := places[task.key]) is not None]

    def of_average(self, average: str) -> list[Task]:
        """The tasks whose scores enter an average."""
        return [task for task in self.tasks if average == DATACOMP or average in task.averages]


def _fits(task: Task, name: str) -> bool:
    return any(fnmatch(own.lower(), name.lower()) for own in (task.key, task.name, task.folder))


def load_tasks() -> TaskList:
    return TaskList.model_validate(yaml.safe_load((_FILES / "datacomp.yaml").read_text(encoding="utf-8")))


class Published(BaseModel):
    """An entry of published.yaml: what one source prints of an average."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    average: str
    percent: dict[str, dict[str, float]]  # setting -> method -> score


def published_scores() -> list[Published]:
    """All that published.yaml has."""
    entries = yaml.safe_load((_FILES / "published.yaml").read_text(encoding="utf-8"))
    return [Published.model_validate(entry) for entry in entries]
