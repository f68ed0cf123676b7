"""Set the learning rate and update the weights; all ranks skip the update if the gradient is not finite."""

import math
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from neuclip_ds.engine.zero import forget_gradients


def update_weights(engine: Any) -> tuple[float, bool]:
    """Step DeepSpeed's engine after a backward pass; a skipped update leaves the weights and moments unchanged.

    Returns the gradient norm, which is not finite if the update was skipped, and whether the weights were updated;
    both are equal on all ranks.
    """
    if engine.optimizer is not engine.basic_optimizer:  # DeepSpeed's wrappers decide whether to skip
        engine.step()
        if not engine.was_step_applied():
            forget_gradients(engine)
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
