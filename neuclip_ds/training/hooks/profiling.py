"""Profile some steps of a run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class ProfileSteps(Hook):
    """Record `run.profile_steps` steps, the wait for their batches included, into profile/."""

    def __init__(self, loop: Loop) -> None:
        context, run = loop.context, loop.context.config.run
        labels = {
            "method": loop.fingerprint["method"],
            "zero_stage": int(context.engine.zero_optimization_stage()),
        }
        self._recorder = Recorder(
            loop.folder / "profile", context.communicator, run.profile_steps, run.profile_after, labels
        )
        self._step = ExitStack()

    def before_step(self, loop: Loop) -> None:
        self._step.enter_context(self._recorder.step())

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._step.close()

    def close(self, loop: Loop, error: BaseException | None) -> None:
        self._recorder.__exit__(None if error is None else type(error), error, None)
