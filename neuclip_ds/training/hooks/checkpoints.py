"""Save checkpoints, and stop a run after one when the launcher or the user asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from neuclip_ds.distributed.stop_signals import STOP_SIGNALS, deferring, take_signal
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
    """Save every `run.checkpoint_every` steps, after the last step, and before a requested stop."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.saves or loop.stop_requested:
            self._events.merge(loop.context.communicator.gather_objects)
            loop.save()
