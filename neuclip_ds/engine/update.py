"""Learning rate and update of the weights, skipped on all ranks where the gradient is not finite; fp16's loss scale."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch.nn.utils import get_total_norm

from neuclip_ds.engine.zero import forget_gradients

_SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def update_weights(engine: Any) -> tuple[float, bool]:
    """Step DeepSpeed's engine after a backward pass; a skipped update leaves weights and moments as they were.

    Returns the gradient's norm, not finite if the update was skipped, and whether the weights have moved; both are
    equal on all ranks.
    """
    if engine.optimizer is not engine.basic_optimizer:  # DeepSpeed's wrappers skip by themselves
        engine.step()
        if not engine.was_step_applied():
            forget_gradients(engine)
        elif (scale := loss_scale_of(engine)) is not None:
            scale.grow()
        return float(engine.get_global_grad_norm()), engine.was_step_applied()
    norm = float(get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None]))
    applied = math.isfinite(norm)
    if applied:
        engine.step()
    else:
        engine.optimizer.zero_grad()
        engine.skipped_steps += 1
    return norm, applied


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class LossScale(DynamicLossScaler):
    """DeepSpeed's scale of fp16 towers' losses, which grows between two steps and stays at its minimum.

    DeepSpeed multiplies the loss by it, skips a step whose gradient overflows, and halves it then. Its own scale grows
    within a step, whose gradient it then divides by the larger scale; and it ends the run when it cannot fall further.
    """

    def __init__(self, scaler: DynamicLossScaler) -> None:
        names = ("scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
        options = {name: getattr(scaler, name) for name in names}
        super().__init__(scaler.cur_scale, **options, raise_error_at_min_scale=False)

    @property
    def is_least(self) -> bool:
        """Whether it cannot fall further, so that an overflow has another cause."""
        return bool(self.cur_scale <= self.min_scale)

    def update_scale(self, overflow: bool) -> None:
        """Count a step, and shrink after an overflow; DeepSpeed calls it before the weights are updated."""
        if overflow:
            super().update_scale(overflow)
        else:
            self.cur_iter += 1

    def grow(self) -> None:
        """Double after `fp16.loss_scale_window` steps without overflow; call it after each."""
        super().update_scale(False)
        self.cur_iter -= 1  # it already counts this step

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint, as integers: scales are powers of two."""
        return {f"loss_scale.{name}": int(getattr(self, name)) for name in _SCALE_STATE}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Restore the result of `state`, if present."""
        for name in _SCALE_STATE:
            setattr(self, name, state.get(f"loss_scale.{name}", getattr(self, name)))


def install_loss_scale(engine: Any) -> None:
    """Replace DeepSpeed's dynamic scale, if the engine has one, with ours."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        engine.optimizer.loss_scaler = LossScale(scaler)


def loss_scale_of(engine: Any) -> LossScale | None:
    """Return an engine's dynamic loss scale, or None."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if isinstance(scaler, LossScale) else None
