"""Save checkpoints, and stop a run after one when the launcher or the user asks for it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import torch

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
    """Save every `run.checkpoint_every` steps, after the last step, and before a requested stop."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.saves or loop.stop_requested:
            self._events.merge(loop.context.communicator.gather_objects)
            loop.save()
