"""Save checkpoints, and stop a run after one when the launcher or the user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from neuclip_ds.checkpoint.writing import SaveFailed
from neuclip_ds.distributed.stop_signals import STOP_SIGNALS, deferring, take_signal
from neuclip_ds.errors import UserError
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class StopOnSignal(Hook):
    """Stop all ranks after the same step, with a checkpoint, when one of them has received a stop signal."""

    def start(self, loop: Loop) -> None:
        loop.resources.enter_context(deferring())

    def after_step(self, loop: Loop, result: StepResult) -> None:
        """Agree at steps that log whether any rank has received a signal, and which."""
        if not result.logs:
            return
        communicator = loop.context.communicator
        taken = take_signal()
        received = torch.tensor([int(number == taken) for number in STOP_SIGNALS], device=communicator.device)
        counts = communicator.all_reduce(received, "control").tolist()
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count:
                loop.stop_requested, loop.stop_signal = True, number


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
