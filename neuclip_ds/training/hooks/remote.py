"""Copy checkpoints to a remote store while training continues."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints, read_best, step_folder
from neuclip_ds.checkpoint.mirror import Mirror
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.redaction import redact
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.training.hooks.base import Hook
from neuclip_ds.training.remote import copy_of

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult

log = logging.getLogger(__name__)

_LONGEST_WAIT = 1500  # seconds, within the 30 minutes for which other ranks wait in a collective


class CopyCheckpoints(Hook):
    """Copy each checkpoint that is complete, and the best one, from rank 0; a failure is an event, and no more.

    Comes after the hooks that save checkpoints and choose the best.
    """

    def __init__(self, events: EventLog, remote: str) -> None:
        self._events, self._remote = events, remote
        self._mirror: Mirror | None = None  # on rank 0
        self._copied = 0  # `changes` of the checkpoints that were passed on

    def start(self, loop: Loop) -> None:
        run = loop.context.config.run
        if loop.context.communicator.rank == 0:
            self._mirror = Mirror(loop.folder, copy_of(self._remote, loop.folder, run.folder), run.keep_remote)
            loop.checkpoints.in_use = self._mirror.uses
            self._copied = loop.checkpoints.changes
            if loop.done:  # an earlier start may not have copied it
                self._copy(self._mirror, loop)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if self._mirror is None:
            return
        if loop.checkpoints.changes != self._copied:
            self._copied = loop.checkpoints.changes
            self._copy(self._mirror, loop)
        if result.logs:
            self._report(self._mirror, loop)

    def finish(self, loop: Loop) -> None:
        if self._mirror is not None and loop.checkpoints.changes != self._copied:  # the last evaluation was the best
            self._copy(self._mirror, loop)

    def close(self, loop: Loop, error: BaseException | None) -> None:
        """Wait on all ranks for the copies where the loop has ended well or was stopped; a signal ends the wait."""
        try:
            if error is None:
                loop.context.communicator.on_rank_zero(lambda: self._wait(loop))
        finally:
            if self._mirror is not None:
                self._mirror.close()

    def _wait(self, loop: Loop) -> None:
        assert self._mirror is not None  # of rank 0
        with deferring(False):
            if not (done := self._mirror.wait(1.0)):
                log.info("waiting for the copies to %s", redact(self._remote))
                done = self._mirror.wait(_LONGEST_WAIT)
        self._report(self._mirror, loop)
        if not done:
            log.warning("the copies to %s take longer than %d s", redact(self._remote), _LONGEST_WAIT)

    def _copy(self, mirror: Mirror, loop: Loop) -> None:
        folder = loop.folder / "checkpoints"
        newest, best = max(complete_checkpoints(folder), default=None), read_best(folder)
        kept = None if best is None else step_folder(folder, best.step)
        chosen: list[Path] = [path for path in dict.fromkeys((newest, kept)) if path is not None and path.is_dir()]
        if chosen:
            mirror.copy(chosen)

    def _report(self, mirror: Mirror, loop: Loop) -> None:
        for message in mirror.take_failures():
            self._events.add(loop.done, "copy_failed", f"{message} Training continues; the next one is copied again.")
