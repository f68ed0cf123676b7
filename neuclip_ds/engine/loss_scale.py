"""The dynamic loss scale of fp16 towers.

DeepSpeed multiplies the loss by it, skips a step whose gradient overflows, and halves it then. A skipped step leaves no
state changed (training/step.py), as any other that is not finite.
"""

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler


class LossScale(DynamicLossScaler):
    """DeepSpeed's scale, which grows between two steps and stays at its minimum.

    DeepSpeed's own grows within a step, whose gradient it then divides by the larger scale; and it ends the run where
    the scale cannot fall further.
    """

    def __init__(self, scaler: DynamicLossScaler) -> None:
        super().__init__(
            scaler.cur_scale,
            scaler.scale_window,
            scaler.min_scale,
            scaler.delayed_shift,
            scaler.consecutive_hysteresis,
            raise_error_at_min_scale=False,
        )

    @property
    def is_least(self) -> bool:
        """Whether it cannot fall further, so that an overflow is no matter of scale."""
        return bool(self.cur_scale <= self.min_scale)

    def update_scale(self, overflow: bool) -> None:
        """Count a step, after an overflow with a smaller scale; DeepSpeed calls it before the weights are updated."""
        if overflow:
            super().update_scale(overflow)
        else:
            self.cur_iter += 1

    def grow(self) -> None:
        """Double the scale after `fp16.loss_scale_window` steps without overflow; call it after each step."""
        stable = self.cur_iter - self.last_overflow_iter - 1
        if stable > 0 and self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        if stable > 0 and stable % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor

    def state(self) -> dict[str, int]:
        """Return what a checkpoint keeps; scales are powers of two."""
        return {f"loss_scale.{name}": int(getattr(self, name)) for name in _STATE}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Take back what `state` returned, if it is there."""
        for name in _STATE:
            setattr(self, name, state.get(f"loss_scale.{name}", getattr(self, name)))


_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def install_loss_scale(engine: Any) -> None:
    """Exchange DeepSpeed's dynamic scale, if the engine has one, for ours."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        engine.optimizer.loss_scaler = LossScale(scaler)


def loss_scale_of(engine: Any) -> LossScale | None:
    """Return an engine's dynamic loss scale, None where it has none."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if isinstance(scaler, LossScale) else None
