"""Learning-rate schedules as pure functions of the step."""

import math

from neuclip_ds.config import OptimizerConfig


def warmup_cosine(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step: lr (step + 1) / warmup, then a half cosine from lr to min_lr at `total`.

    The form is that of open_clip and FastCLIP.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (config.lr - config.min_lr)
