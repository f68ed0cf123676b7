"""Evaluation tasks on disk: DataComp's tasks (datacomp.yaml) and your own sets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.sets import FORMS, is_set, open_set

log = logging.getLogger(__name__)

DATACOMP = "datacomp"  # the average of all tasks
_OWN = "own/"  # prefix of the keys of sets that are not DataComp's
_RECALL = "mean_recall@1"
_FILES = Path(__file__).parent


class GroupRule(BaseModel):
    """Rule for computing accuracies per group; the group numbers are in a column of the npy member."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    field: str
    column: int
    worst: str  # name of the metric for the smallest accuracy
    accuracy: str = "acc"  # prefix of the other accuracies' names
    top: Literal[1, 5] = 1


class Task(BaseModel):
    """A task in datacomp.yaml, which explains the fields, or one of your own sets, which has no source and no size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    name: str
    folder: str
    source: str | None = None
    size: int | None = None
    kind: Literal["classification", "retrieval", "winogavil"] = "classification"
    metric: str = "acc1"
    f1: bool = False
    groups: tuple[GroupRule, ...] = ()
    averages: tuple[str, ...] = ()

    @classmethod
    def own(cls, name: str, kind: Literal["classification", "retrieval"]) -> Task:
        """Return a task for a set that is not one of DataComp's; averages do not include the task."""
        metric = _RECALL if kind == "retrieval" else "acc1"
        return cls(key=f"{_OWN}{name}", name=name, folder=name, kind=kind, metric=metric)

    def find(self, places: Sequence[Path]) -> Path | None:
        """Return the first folder in `places` that is named after the task's set, or None."""
        names = (self.folder, self.folder.removesuffix("_test"))
        return next((place for name in names for place in places if place.name == name and place.is_dir()), None)


class TaskList(BaseModel):
    """The contents of datacomp.yaml, optionally with your own sets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    averages: dict[str, str]  # name -> description
    tasks: tuple[Task, ...]

    def choose(self, names: Sequence[str]) -> list[Task]:
        """Return the tasks that match `names`, in the list's order, or all tasks if `names` is empty.

        `names` are task names, keys, folders or patterns such as imagenet*. Raises UserError if a name matches no task.
        """
        if unknown := next((name for name in names if not any(_fits(task, name) for task in self.tasks)), None):
            raise UserError(f"Unknown task {unknown}; the tasks are {', '.join(task.key for task in self.tasks)}.")
        return [task for task in self.tasks if not names or any(_fits(task, name) for name in names)]

    def with_own(self, others: Sequence[Task]) -> TaskList:
        """Return a copy of the list with `others` appended."""
        return self.model_copy(update={"tasks": (*self.tasks, *others)})

    def with_scored(self, metrics: Mapping[str, Mapping[str, Any]]) -> TaskList:
        """Return the tasks plus those of the user's sets that have an entry in `metrics`, a mapping by task key."""
        own = {key.removeprefix(_OWN): found for key, found in metrics.items() if key.startswith(_OWN)}
        return self.with_own(
            [Task.own(name, "retrieval" if _RECALL in own[name] else "classification") for name in own]
        )

    def on_disk(self, places: Sequence[Path], names: Sequence[str] = ()) -> list[tuple[Task, Path]]:
        """Return the tasks that match `names` (see `choose`; by default all tasks on disk), with their paths.

        `places` are sets of any form and name, or folders of sets. If only some of DataComp's sets are found, a warning
        lists the missing ones. Raises UserError if no set is found, a name matches no set, or two sets share a name.
        """
        found = [path for place in places for path in _sets(place)]
        known = {task.key: task.find(found) for task in self.tasks}
        taken = {path for path in known.values() if path is not None}
        own = [(_own(path), path) for path in found if path not in taken and is_set(path)]
        name, count = Counter(task.name for task, _ in own).most_common(1)[0] if own else ("", 0)
        if count > 1:
            raise UserError(f"{count} evaluation sets are called {name}; rename all but one.")
        chosen = self.with_own([task for task, _ in own]).choose(names)
        folders = {**known, **{task.key: path for task, path in own}}
        missing = [task for task in chosen if folders[task.key] is None]
        below = ", ".join(map(str, places))
        if len(missing) == len(chosen) or (names and missing):
            named = ", ".join(f"{task.name} ({task.folder})" for task in missing)
            raise UserError(f"Not found below {below}: {named}; docs/how-to/evaluate.md lists sources. Sets: {FORMS}.")
        if missing and taken:
            log.warning("not found below %s, and skipped: %s", below, ", ".join(task.name for task in missing))
        return [(task, folder) for task in chosen if (folder := folders[task.key]) is not None]

    def on_disk_of_all(
        self, places: Sequence[Path], names: Sequence[str], communicator: Communicator
    ) -> list[tuple[Task, Path]]:
        """Call `on_disk` on rank 0 and return its result on all ranks."""

        def find() -> list[Any]:
            return [[task.model_dump(mode="json"), str(path)] for task, path in self.on_disk(places, names)]

        return [(Task.model_validate(task), Path(path)) for task, path in communicator.on_rank_zero(find)]

    def in_average(self, average: str) -> list[Task]:
        """Return the tasks whose scores are part of an average."""
        published = [task for task in self.tasks if task.source is not None]
        return [task for task in published if average == DATACOMP or average in task.averages]


def _sets(place: Path) -> list[Path]:
    """Return the path itself if it is a set, or else the sets and subfolders in it."""
    if is_set(place):
        return [place.absolute()]
    if not place.is_dir():
        raise UserError(f"{place} is not a folder; name the one that contains the evaluation sets, or a set.")
    return sorted(path for path in place.iterdir() if path.is_dir() or is_set(path))


def _own(path: Path) -> Task:
    kind: Any = open_set(path).kind
    if kind not in ("classification", "retrieval"):
        raise UserError(f"{path} is a {kind} set, which has no score here; move it elsewhere.")
    return Task.own(path.stem if path.is_file() else path.name, kind)


def _fits(task: Task, name: str) -> bool:
    return any(fnmatch(known.lower(), name.lower()) for known in (task.key, task.name, task.folder))


def load_tasks() -> TaskList:
    """Return the task list in datacomp.yaml."""
    return TaskList.model_validate(yaml.safe_load((_FILES / "datacomp.yaml").read_text(encoding="utf-8")))
