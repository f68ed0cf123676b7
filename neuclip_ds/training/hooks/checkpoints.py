"""Save checkpoints, and stop a run after one when the launcher or the user asks for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from neuclip_ds.checkpoint.writing import SaveFailed
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopOnSignal(Hook):
    """Ask for a stop on SIGTERM (launchers, schedulers), SIGUSR1 (SLURM's warning) or the first Ctrl-C."""

    _received = False

    def start(self, loop: Loop) -> None:
        self._handlers = [signal.signal(number, self._receive) for number in _SIGNALS]

    def after_step(self, loop: Loop, result: StepResult) -> None:
        """Agree at steps that log whether any rank has received a signal."""
        if result.logs:
            communicator = loop.context.communicator
            received = torch.tensor([int(self._received)], device=communicator.device)
            loop.stop_requested |= bool(communicator.all_reduce(received, "control").item())

    def close(self, loop: Loop, error: BaseException | None) -> None:
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self._received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the run at once


class SaveCheckpoints(Hook):
    """Save every `run.checkpoint_every` steps, after the last step, and before a requested stop.

    Where that fails, training continues to the next checkpoint, until `run.save_attempts` have failed in a row.
    """

    def __init__(self, events: EventLog) -> None:
        self._events, self._failed = events, 0

    def after_step(self, loop: Loop, result: StepResult) -> None:
        last = result.last or loop.stop_requested
        if result.saves or loop.stop_requested:
            self.save(loop, last)
        elif result.logs:
            self._try(loop, loop.checkpoints.publish)
        if last:
            self._try(loop, loop.checkpoints.finish, last)

    def save(self, loop: Loop, last: bool = False) -> None:
        """Save now; `last` raises `UserError` where that fails, as no further checkpoint follows."""
        self._events.merge(loop.context.communicator.gather_objects)
        self._try(loop, loop.checkpoints.finish)
        self._try(loop, loop.save, last)

    def complete(self, loop: Loop) -> bool:
        """Wait for a save in progress; return whether this step has its checkpoint."""
        self._try(loop, loop.checkpoints.finish)
        return loop.saved == loop.done

    def close(self, loop: Loop, error: BaseException | None) -> None:
        loop.checkpoints.abandon()

    def _try(self, loop: Loop, work: Callable[[], bool], last: bool = False) -> None:
        """Call what may complete a checkpoint and returns whether it did; count failures in a row."""
        try:
            if work():
                self._failed = 0
        except SaveFailed as error:
            self._failed += 1
            loop.saved = 0
            if last or self._failed >= loop.context.config.run.save_attempts:
                raise UserError(
                    f"{error} It is number {self._failed} in a row. Make room and check the disk; the same command "
                    "then resumes from the newest checkpoint."
                ) from error
            if loop.context.communicator.rank == 0:
                self._events.add(loop.done, "save_failed", f"{error} Training continues without this checkpoint.")
