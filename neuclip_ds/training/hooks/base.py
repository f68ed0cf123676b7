"""The protocol of what happens around training steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip_ds.config import Config
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class Hook:
    """Do something around the steps of a loop: override the methods that you need.

    All ranks have the same hooks and call them in the same order, so a hook may use collectives. `Loop` says what a
    hook can read and ask for. Those that are passed to `train` come before those of every run (health, metrics,
    signals, checkpoints, evaluation) and are closed after them.

    Attributes:
        in_recovery: whether the hook also runs around the steps that recover statistics (`recovery.*`).

    Example:
        class StopBelow(Hook):
            def after_step(self, loop: Loop, result: StepResult) -> None:
                if result.loss < 0.1:
                    loop.stop_requested = True
    """

    in_recovery = False

    def before_run(self, config: Config, communicator: Communicator, folder: Path) -> None:
        """Run before data and model are opened; the run's folder need not exist yet."""

    def start(self, loop: Loop) -> None:
        """Run before the first step of this start, and of a rollback; `loop.done` steps are behind it."""

    def before_step(self, loop: Loop) -> None:
        """Run before the next batch is waited for."""

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        """Run when the batch has come, before it is trained on."""

    def after_step(self, loop: Loop, result: StepResult) -> None:
        """Run after a step."""

    def finish(self, loop: Loop) -> None:
        """Run after the last step; not if the loop was stopped before."""

    def state(self, loop: Loop) -> dict[str, Any]:
        """Return what a checkpoint keeps of the hook: JSON, equal on all ranks; they call it together."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned, before `start`; not if the checkpoint holds nothing of the hook."""

    def close(self, loop: Loop, error: BaseException | None) -> None:
        """Release what `start` took; runs in every case, with the exception that ended the loop, if any: a `RollBack`
        before the run returns to its newest checkpoint."""

    def after_run(self, loop: Loop) -> None:
        """Run when the run has ended without an error and is marked complete, also by an earlier start of it."""
