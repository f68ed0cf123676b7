"""Events of a run, such as loss spikes: each event is logged and written to events.jsonl, which the report reads.

    {"step": 1234, "rank": 0, "kind": "loss_spike", "message": "...", "indices": [17, 4711, ...]}

Steps are numbered from 1, as in metrics.jsonl; 0 means before the first step. `message` is the logged text, and
`indices` lists the samples involved.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from neuclip_ds.files import append_lines, best_effort, records
from neuclip_ds.reporting.metrics import drop_from

log = logging.getLogger(__name__)

FILE = "events.jsonl"


class Event(NamedTuple):
    """A line of events.jsonl."""

    step: int
    rank: int
    kind: str
    message: str
    indices: list[int]


class EventLog:
    """One rank's events. On rank 0, `add` writes to FOLDER/events.jsonl, and `merge` adds the other ranks' events.

    If `add` or `merge` cannot write the file, this is only logged; `resume` raises `OSError`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / FILE
        self._rank = rank
        self._pending: list[Event] = []

    def resume(self, done: int) -> None:
        """Drop events after step `done`, because a resumed run repeats those steps; if `done` is 0, drop all events."""
        first_dropped_step = done + 1 if done else 0
        if self._rank == 0 and self._path.exists():
            drop_from(self._path, first_dropped_step)

    def add(
        self,
        step: int,
        kind: str,
        message: str,
        indices: Sequence[int] = (),
        level: int = logging.WARNING,
        shared: bool = False,
    ) -> None:
        """Log a message and record an event; all ranks report a `shared` event, but only rank 0 logs and records it."""
        if shared and self._rank > 0:
            return
        log.log(level, "%s", message)
        event = Event(step=step, rank=self._rank, kind=kind, message=message, indices=list(indices))
        if self._rank == 0:
            self._append([event])
        else:
            self._pending.append(event)

    def merge(self, gather: Callable[[list[dict[str, Any]]], list[list[dict[str, Any]]]]) -> None:
        """Write the other ranks' events to the file; all ranks must call this method before they save a checkpoint.

        A crash can lose later events, but a resumed run repeats their steps. `gather` collects one object per rank.
        """
        records_of_ranks = gather([event._asdict() for event in self._pending])
        self._pending = []
        if self._rank == 0:
            self._append([Event(**record) for record in chain.from_iterable(records_of_ranks)])

    def _append(self, events: Sequence[Event]) -> None:
        if events:
            with best_effort(self._path):
                append_lines(self._path, [json.dumps(event._asdict()) for event in events])


def read_events(folder: Path) -> Iterator[Event]:
    """Yield the events of a run in step order, and the events of a step in rank order; damaged lines are skipped."""
    path = folder / FILE
    if path.is_file():
        events = []
        for _, record in records(path, "step"):
            with suppress(TypeError, ValueError):
                events.append(_event(**record))
        yield from sorted(events)


def _event(step: int, rank: int, kind: str, message: str, indices: list[int]) -> Event:
    """Return an event from a record; raise `TypeError` or `ValueError` if a field cannot be converted to its type."""
    return Event(int(step), int(rank), str(kind), str(message), [int(index) for index in indices])
