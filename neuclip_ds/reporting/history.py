"""The history of a run's launches (history.jsonl): when each began and ended, its command, and the options it changed.

    {"step": 100, "event": "start", "time": "2026-11-28T12:00:00+00:00", "command": "...", "commit": "...",
     "changes": {"optimizer.lr": [0.002, 0.001]}}
    {"step": 200, "event": "end", "time": "..."}

A launch that was killed has no end. `changes` contains the options that differ from the previous launch, as [old, new].
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Protocol

from neuclip_ds.files import append_lines, best_effort, records

log = logging.getLogger(__name__)

FILE = "history.jsonl"
Changes = Mapping[str, tuple[Any, Any]]
"""Old and new value of each option that changed, by its dotted name."""


class CountsSteps(Protocol):
    """An object that counts the steps that are done, such as a training loop."""

    done: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of a run, as far as the history records it."""

    start: datetime
    end: datetime | None  # None if the launch was killed or is running
    first_step: int  # steps done when it began
    last_step: int | None  # steps done when it ended
    command: str
    commit: str
    changes: Changes


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options whose values differ between two trees of options; a missing option counts as None."""
    old = _leaves(before)
    new = _leaves(after)
    changes: dict[str, tuple[Any, Any]] = {}
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            changes[name] = (old.get(name), new.get(name))
    return changes


def log_changes(changes: Changes) -> None:
    """Log each option that differs from the previous launch."""
    for name, (old, new) in changes.items():
        log.info("%s is %s; in the previous launch, it was %s", name, _json(new), _json(old))


@contextmanager
def recorded_launch(
    folder: Path, environment: Mapping[str, Any], changes: Changes, loop: CountsSteps, writes: bool = True
) -> Iterator[None]:
    """Record the start of a launch in FOLDER/history.jsonl and, unless the process is killed, its end.

    Args:
        folder: the run's folder.
        environment: contains the launch's `command` and `commit`.
        changes: options that differ from the previous launch.
        loop: counts the steps that are done.
        writes: whether this rank writes the file; true on one rank.
    """
    if not writes:
        yield
        return
    launch = {"command": environment.get("command", ""), "commit": environment.get("commit", ""), "changes": changes}
    _append(folder, {"step": loop.done, "event": "start", "time": _now(), **launch})
    try:
        yield
    finally:
        _append(folder, {"step": loop.done, "event": "end", "time": _now()})


def read_launches(folder: Path) -> list[Launch]:
    """Read a run's launches in order; damaged lines are skipped, and a run without history.jsonl has no launches."""
    path = folder / FILE
    if not path.is_file():
        return []
    launches: list[Launch | None] = []
    pending: dict[str, Any] | None = None  # the start of a launch whose end has not been read
    for _, record in records(path, "step"):
        is_start = record.get("event") == "start"
        if pending is not None:
            launches.append(_launch(pending, None if is_start else record))
        pending = record if is_start else None
    if pending is not None:
        launches.append(_launch(pending, None))
    return [launch for launch in launches if launch is not None]


def duration(launches: list[Launch]) -> timedelta:
    """Return the total time of all launches whose end is known."""
    seconds = sum((launch.end - launch.start).total_seconds() for launch in launches if launch.end is not None)
    return timedelta(seconds=round(seconds))


def _launch(start: Mapping[str, Any], end: Mapping[str, Any] | None) -> Launch | None:
    """Return the launch that these records describe, or None if they are damaged."""
    try:
        return Launch(
            start=_time(start),
            end=None if end is None else _time(end),
            first_step=start["step"],
            last_step=None if end is None else end["step"],
            command=str(start["command"]),
            commit=str(start["commit"]),
            changes={name: (old, new) for name, (old, new) in start["changes"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _time(record: Mapping[str, Any]) -> datetime:
    """Return the time of a record; raise `ValueError`, `KeyError` or `TypeError` if it has no time with a time zone."""
    time = datetime.fromisoformat(record["time"])
    if time.tzinfo is None:
        raise ValueError(f"{record['time']} has no time zone")
    return time


def _append(folder: Path, record: Mapping[str, Any]) -> None:
    with best_effort(folder / FILE) as path:
        append_lines(path, [_json(record)])


def _json(value: Any) -> str:
    """Return a value as JSON; values that only YAML supports, such as dates in a config edited by hand, become text."""
    return json.dumps(value, default=str)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted name; lists are values."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
