"""Revert the state updates of a training call, for example because a `GradScaler` skipped the step."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.amp import GradScaler

from neuclip_ds.losses.base import LossFunction


@dataclass(frozen=True)
class _Copy:
    """State from before a training call."""

    restore: Callable[[], None]
    grad_scale: float | None  # the GradScaler's scale before the step; None without an enabled one


class UndoGuard:
    """Keeps a copy of a loss's state, except the per-sample statistics, from before its last training call.

    The per-sample statistics are reverted by their stores (`SampleStore.undo`). Each training call calls `begin` before
    it changes the state, and `commit` once the call is complete.

    Args:
        always: whether to copy the state before every training call; if False, only calls with a scaler copy it.
    """

    def __init__(self, always: bool) -> None:
        self._always = always
        self._begun: _Copy | None = None  # from before the training call that has begun
        self._committed: _Copy | None = None  # from before the last complete training call

    def without_copies(self) -> "UndoGuard":
        """Return a new guard with the same setting."""
        return UndoGuard(self._always)

    def begin(self, function: LossFunction, scaler: GradScaler | None) -> None:
        """Copy the state of `function` before a training call; earlier calls can no longer be reverted."""
        self.forget()
        if self._always or scaler is not None:
            grad_scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
            self._begun = _Copy(function.restore_point(), grad_scale)

    def commit(self) -> None:
        """Mark the training call that has begun as complete, so that `undo` can revert it if `begin` made a copy."""
        self._committed = self._begun
        self._begun = None

    def abandon(self) -> None:
        """Discard the copy of a training call that has begun, but will not be completed."""
        self._begun = None

    def forget(self) -> None:
        """Discard all copies."""
        self._begun = None
        self._committed = None

    def follow(self, copy_state: Callable[[], None]) -> None:
        """Let `undo` also call `copy_state`, which copies the reverted state of a function to its replacement."""
        copied = self._committed
        if copied is None:
            return

        def restore() -> None:
            copied.restore()
            copy_state()

        self._committed = _Copy(restore, copied.grad_scale)

    def undo(self) -> None:
        """Revert the last training call; raise `RuntimeError` if there is no copy from before it."""
        if self._committed is None:
            raise RuntimeError(
                "There is no training call to revert: build ContrastiveLoss with undo=True or a scaler, and call "
                "undo() only once after each training call, before the next one begins."
            )
        self._committed.restore()
        self._committed = None

    def undo_if_skipped(self, scaler: GradScaler | None) -> None:
        """Revert the last training call if the scaler skipped its step, that is, if the scale has dropped.

        Otherwise, the call can still be reverted: the scaler may not have been updated yet.
        """
        if scaler is None or self._committed is None or self._committed.grad_scale is None:
            return
        if scaler.get_scale() < self._committed.grad_scale:
            self.undo()
