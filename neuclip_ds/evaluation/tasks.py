"""Evaluation tasks on disk: DataComp's tasks (datacomp.yaml) and the user's own sets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from neuclip_ds.data.listing import is_visible
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.sets import FORMS, is_set, open_set

log = logging.getLogger(__name__)

DATACOMP = "datacomp"  # the average of all tasks
_USER_SET_PREFIX = "own/"  # of the keys of sets that are not DataComp's
_RETRIEVAL_METRIC = "mean_recall@1"
_CLASSIFICATION_METRIC = "acc1"
_TASKS_FILE = Path(__file__).with_name("datacomp.yaml")


class GroupRule(BaseModel):
    """Rule for computing accuracies per group; the group numbers are in a column of the npy member."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    field: str  # attribute that defines the groups, such as region; part of the metrics' names
    column: int
    worst: str  # name of the metric for the smallest accuracy
    accuracy: str = "acc"  # prefix of the other accuracies' names
    top: Literal[1, 5] = 1  # a sample is a hit if its class is among the first `top` predictions


class Task(BaseModel):
    """A task in datacomp.yaml, which explains the fields, or a user's own set, which has no source and no size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    name: str
    folder: str
    source: str | None = None
    size: int | None = None
    kind: Literal["classification", "retrieval", "winogavil"] = "classification"
    metric: str = _CLASSIFICATION_METRIC
    f1: bool = False
    groups: tuple[GroupRule, ...] = ()
    averages: tuple[str, ...] = ()

    @classmethod
    def own(cls, name: str, kind: Literal["classification", "retrieval"]) -> Task:
        """Return a task for a set that is not one of DataComp's; averages do not include the task."""
        metric = _RETRIEVAL_METRIC if kind == "retrieval" else _CLASSIFICATION_METRIC
        return cls(key=f"{_USER_SET_PREFIX}{name}", name=name, folder=name, kind=kind, metric=metric)

    def find(self, paths: Sequence[Path]) -> Path | None:
        """Return the first of `paths` that is a folder with the name of the task's set, or None.

        A folder whose name lacks the ending _test is returned only if no folder has the full name.
        """
        for name in (self.folder, self.folder.removesuffix("_test")):
            for path in paths:
                if path.name == name and path.is_dir():
                    return path
        return None

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern matches the key, the name or the folder of the task; case is ignored."""
        identifiers = (self.key, self.name, self.folder)
        return any(fnmatch(identifier.lower(), pattern.lower()) for identifier in identifiers)


class TaskList(BaseModel):
    """Evaluation tasks and averages of datacomp.yaml, optionally with the user's own sets as further tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    averages: dict[str, str]  # name -> description
    tasks: tuple[Task, ...]

    def choose(self, names: Sequence[str]) -> list[Task]:
        """Return the tasks that match `names`, in the list's order, or all tasks if `names` is empty.

        `names` are task names, keys, folders or patterns such as imagenet*. Raises UserError if a name matches no task.
        """
        for name in names:
            if not any(task.matches(name) for task in self.tasks):
                raise UserError(f"Unknown task {name}; the tasks are {', '.join(task.key for task in self.tasks)}.")
        if not names:
            return list(self.tasks)
        return [task for task in self.tasks if any(map(task.matches, names))]

    def with_own(self, others: Sequence[Task]) -> TaskList:
        """Return a copy of the list with `others` appended."""
        return self.model_copy(update={"tasks": (*self.tasks, *others)})

    def with_scored(self, metrics: Mapping[str, Mapping[str, Any]]) -> TaskList:
        """Return the list extended by the user's sets in `metrics`, which maps task keys to the tasks' metrics."""
        user_tasks = []
        for key, metrics_of_task in metrics.items():
            if key.startswith(_USER_SET_PREFIX):
                name = key.removeprefix(_USER_SET_PREFIX)
                user_tasks.append(
                    Task.own(name, "retrieval" if _RETRIEVAL_METRIC in metrics_of_task else "classification")
                )
        return self.with_own(user_tasks)

    def on_disk(
        self, paths: Sequence[Path], names: Sequence[str] = (), own_names: Mapping[Path, str] | None = None
    ) -> list[tuple[Task, Path]]:
        """Return the tasks that match `names` (see `choose`; by default all tasks on disk), with their paths.

        `paths` are sets of any form and name, or folders of sets. A path in `own_names` is a user's set with the name
        given there. If only some of DataComp's sets are found, a warning lists the missing ones. Raises UserError if a
        path contains no set, a name matches no task, the set of a task that a name matches is missing, two of the
        user's sets share a name, one of them is unreadable or neither for classification nor for retrieval, or a path
        in `own_names` is not a set.
        """
        own_names = own_names or {}
        candidates: list[Path] = []
        candidates_of_path: dict[Path, list[Path]] = {}
        for path in paths:
            if path in own_names and not is_set(path):
                raise UserError(
                    f"NAME=PATH names a single evaluation set, but {path} is not one; omit {own_names[path]}=."
                )
            candidates_of_path[path] = _sets_in(path)
            candidates += candidates_of_path[path]
        name_of_set = {path.absolute(): name for path, name in own_names.items()}

        # DataComp's sets are recognized by their folders' names; other sets are the user's
        unnamed = [path for path in candidates if path not in name_of_set]
        path_of_task = {task.key: task.find(unnamed) for task in self.tasks}
        known_paths = {path for path in path_of_task.values() if path is not None}
        user_paths = [path for path in candidates if path not in known_paths and is_set(path)]
        user_tasks = _user_tasks(user_paths, name_of_set)
        for task, path in zip(user_tasks, user_paths, strict=True):
            path_of_task[task.key] = path

        chosen_on_disk = []
        missing = []
        for task in self.with_own(user_tasks).choose(names):
            path_or_none = path_of_task[task.key]
            if path_or_none is None:
                missing.append(task)
            else:
                chosen_on_disk.append((task, path_or_none))
        searched = ", ".join(map(str, paths))
        if names and missing:
            listed = ", ".join(f"{task.name} ({task.folder})" for task in missing)
            raise _not_found(f"These evaluation sets were not found in {searched}: {listed}")
        if not chosen_on_disk:
            raise _not_found(f"No evaluation set was found in {searched}")
        for path, below in candidates_of_path.items():
            has_known_set = any(task.find(below) is not None for task in self.tasks)
            if not has_known_set and not any(map(is_set, below)):
                raise UserError(
                    f"{path} contains no evaluation set: omit it, or pass a folder with sets or, for shards of pairs, "
                    "the folder that contains the tars."
                )
        if missing and known_paths:
            names_of_missing = ", ".join(task.name for task in missing)
            log.warning("skipping evaluation sets that were not found in %s: %s", searched, names_of_missing)
        return chosen_on_disk

    def on_disk_of_all(
        self,
        paths: Sequence[Path],
        names: Sequence[str],
        communicator: Communicator,
        own_names: Mapping[Path, str] | None = None,
    ) -> list[tuple[Task, Path]]:
        """Call `on_disk` on rank 0 and return its result on all ranks."""
        return communicator.value_from_rank_zero(list[tuple[Task, Path]], lambda: self.on_disk(paths, names, own_names))

    def in_average(self, average: str) -> list[Task]:
        """Return the tasks whose scores are part of an average."""
        published = [task for task in self.tasks if task.source is not None]
        return [task for task in published if average == DATACOMP or average in task.averages]


def _sets_in(path: Path) -> list[Path]:
    """Return the path itself if it is a set, or else the sets and subfolders in it.

    Raises UserError if it is neither a set nor a folder.
    """
    if is_set(path):
        return [path.absolute()]
    if not path.is_dir():
        raise UserError(f"{path} is neither a folder nor an evaluation set; pass a set, or a folder of sets.")
    entries = [entry for entry in path.iterdir() if is_visible(entry.name)]
    return sorted(entry for entry in entries if entry.is_dir() or is_set(entry))


def _not_found(problem: str) -> UserError:
    return UserError(
        f"{problem}; check the path. What a set looks like: {FORMS}. docs/how-to/evaluate.md explains where to get "
        "DataComp's sets."
    )


def _user_tasks(paths: Sequence[Path], names: Mapping[Path, str]) -> list[Task]:
    """Return the tasks of the user's sets at `paths`, some of which have `names`.

    Raises UserError if two sets share a name, or if a set is unreadable or neither for classification nor for
    retrieval.
    """
    tasks = [_user_task(path, names.get(path)) for path in paths]
    for name, count in Counter(task.name for task in tasks).most_common(1):
        if count > 1:
            raise UserError(
                f"{count} evaluation sets are called {name}; pass them as NAME=PATH (in --data), or rename them."
            )
    return tasks


def _user_task(path: Path, name: str | None = None) -> Task:
    """Return the task of a user's set, by default with the name of its folder or file."""
    kind: Any = open_set(path).kind
    if kind not in ("classification", "retrieval"):
        raise UserError(
            f"{path} is a {kind} set, which neuclip_ds cannot score; omit it, or move it out of the folder."
        )
    return Task.own(name or (path.stem if path.is_file() else path.name), kind)


def load_tasks() -> TaskList:
    """Return the task list in datacomp.yaml."""
    return TaskList.model_validate(yaml.safe_load(_TASKS_FILE.read_text(encoding="utf-8")))
