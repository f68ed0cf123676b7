"""Save checkpoints during a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuclip_ds.checkpoint.integrity import SaveFailed
from neuclip_ds.errors import UserError
from neuclip_ds.training.hooks import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

_MAX_FAILURES = 3  # consecutive failed saves that end the run


class SaveCheckpoints(Hook):
    """Saves a checkpoint every `run.checkpoint_every` steps, after the last step, and before a requested stop.

    If the step at which a checkpoint is due is skipped, the checkpoint is saved after the next step that is applied. If
    a save fails, training continues until a later step saves again. Three consecutive failures, or a failure of the
    last save, end the run with a `UserError`.
    """

    def __init__(self) -> None:
        self._failures = 0  # consecutive failed saves
        self._last_attempt = 0  # steps done at the last attempt to save

    def start(self, loop: Loop) -> None:
        self._last_attempt = loop.done

    def after_step(self, loop: Loop, result: StepResult) -> None:
        is_last = loop.done == loop.total or loop.stop_requested
        if is_last or self._is_due(loop, result):
            self.save(loop, is_last)

    def save(self, loop: Loop, is_last: bool = False) -> None:
        """Save a checkpoint now; if that fails, record an event and let training continue.

        After a failure, further calls in the same step do nothing: evaluations also save, and a step in which the disk
        is full must count as one failure. Raises `UserError` if the save that failed is the last one or the third in a
        row, and `TrainingDiverged` if replicated state differs between ranks.
        """
        if self._failures and self._last_attempt == loop.done:
            return
        loop.events.merge(loop.context.communicator.gather_objects)
        self._last_attempt = loop.done
        try:
            loop.save()
            self._failures = 0
        except SaveFailed as error:
            self._failures += 1
            if is_last or self._failures >= _MAX_FAILURES:
                failures = f" {self._failures} saves in a row have failed." if self._failures > 1 else ""
                raise UserError(
                    f"{error}{failures} Free disk space and check the disk; the same command then resumes from the "
                    "newest checkpoint."
                ) from error
            message = f"{error} Training continues without this checkpoint."
            loop.events.add(loop.done, "save_failed", message, shared=True)

    def _is_due(self, loop: Loop, result: StepResult) -> bool:
        """Return whether the step was applied and passed a multiple of `run.checkpoint_every` since the last attempt.

        Earlier updates may be the reason for a skipped step, so a checkpoint waits for the next applied step.
        """
        every = loop.context.config.run.checkpoint_every
        return result.applied and loop.done // every > self._last_attempt // every
