"""One update of the weights, which is skipped on all ranks where the gradient is not finite."""

import math
from typing import Any, NamedTuple

from torch.nn.utils import get_total_norm

from neuclip_ds.engine.loss_scale import loss_scale_of
from neuclip_ds.engine.zero import forget_gradients


class Update(NamedTuple):
    """What became of a gradient; equal on all ranks."""

    grad_norm: float  # of the encoders; not finite where the update was skipped
    applied: bool  # whether the weights have moved


def update_weights(engine: Any) -> Update:
    """Step DeepSpeed's engine after a backward pass; a skipped update leaves weights and moments as they were."""
    if engine.optimizer is not engine.basic_optimizer:  # DeepSpeed's wrappers skip by themselves
        engine.step()
        if not engine.was_step_applied():
            forget_gradients(engine)
        elif (scale := loss_scale_of(engine)) is not None:
            scale.grow()
        return Update(float(engine.get_global_grad_norm()), engine.was_step_applied())
    norm = float(get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None]))
    applied = math.isfinite(norm)
    if applied:
        engine.step()
    else:
        engine.optimizer.zero_grad()
        engine.skipped_steps += 1
    return Update(norm, applied)
