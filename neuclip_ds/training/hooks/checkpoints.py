"""Save checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuclip_ds.reporting.events import EventLog
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class SaveCheckpoints(Hook):
    """Save every `run.checkpoint_every` steps, after the last step, and before a requested stop."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.saves or loop.stop_requested:
            self._events.merge(loop.context.communicator.gather_objects)
            loop.save()
