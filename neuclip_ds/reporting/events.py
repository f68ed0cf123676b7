"""What went wrong in a run and when: words in the log, and a line in events.jsonl for the report and for programs.

    {"step": 1234, "rank": 0, "kind": "loss_spike", "words": "...", "indices": [17, 4711, ...]}

Steps count from 1, as in metrics.jsonl; the indices are those of the samples that the step saw.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.reporting.step_lines import drop_from, step_records

log = logging.getLogger(__name__)

FILE = "events.jsonl"


class Event(NamedTuple):
    step: int
    rank: int
    kind: str
    words: str
    indices: list[int]


Gather = Callable[[list[Event]], list[list[Event]]]


class EventLog:
    """Every rank has one; rank 0 keeps the file, its own events at once and those of the others when they `settle`."""

    def __init__(self, folder: Path, rank: int, done: int) -> None:
        """
        Args:
            folder: where events.jsonl is.
            rank: of this process.
            done: the last step to keep of an earlier start's events; 0 keeps none.
        """
        self._path, self._rank = folder / FILE, rank
        self._pending: list[Event] = []
        if rank == 0 and self._path.exists():
            drop_from(self._path, done + 1 if done else 0)

    def add(self, step: int, kind: str, words: str, indices: Sequence[int] = (), level: int = logging.WARNING) -> None:
        """Logs `words` at a level, and keeps them."""
        log.log(level, "%s", words)
        event = Event(step, self._rank, kind, words, list(indices))
        if self._rank == 0:
            self._append([event])
        else:
            self._pending.append(event)

    def settle(self, gather: Gather) -> None:
        """Puts the other ranks' events into the file; all ranks call it, before a checkpoint.

        Events after it belong to steps that a resumed run repeats, so nothing is lost in between.
        """
        shares = gather(self._pending)
        self._pending = []
        if self._rank == 0:
            self._append([event for share in shares for event in share])

    def _append(self, events: Sequence[Event]) -> None:
        if events:
            with self._path.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(event._asdict()) + "\n" for event in events)


def read_events(folder: Path) -> Iterator[Event]:
    """The events of a run in order of steps; none where nothing went wrong."""
    path = folder / FILE
    if path.is_file():
        yield from sorted(Event(**record) for _, record in step_records(path))
