"""Compute the number of steps in a run and the learning rate at each step."""

import math

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.data.mixture import BatchOrder

_RUN_PER_FITTED_WARMUP = 10  # a warm-up that does not fit into the run is shortened to a tenth of the run
_RUN_PER_COOLDOWN = 5  # the default cooldown is a fifth of the run


def run_length(order: BatchOrder, epochs: float, max_steps: int | None = None) -> int:
    """Return the number of steps in a run: `max_steps` or, by default, the steps of `epochs` epochs (at least one)."""
    return max_steps or max(round(epochs * order.steps_per_epoch), 1)


def is_partial_batch(order: BatchOrder, step: int) -> bool:
    """Return whether the batch of a step (counted from 0) is the last of several in an epoch and under half full."""
    step_of_epoch = step % order.steps_per_epoch
    last_of_epoch = order.steps_per_epoch - 1
    return 0 < step_of_epoch == last_of_epoch and 2 * order.last_batch_size < order.batch_size


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the learning rate at a step (counted from 0) of `total`: a linear warm-up to lr, then `config.schedule`.

    The warm-up, `cosine` and `cooldown` match open_clip. `wsd` is the warm-up-stable-decay schedule of Hu et al. 2024
    (MiniCPM), with the decay of Haegele et al. 2024 (arXiv:2405.18392).
    """
    warmup = fitted_warmup(config.warmup_steps, total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    steps_after_warmup = max(1, total - warmup)
    step_after_warmup = step - warmup
    cooldown = config.cooldown_steps
    if cooldown is None:
        cooldown = max(1, total // _RUN_PER_COOLDOWN)
    cooldown = min(cooldown, steps_after_warmup)
    cooldown_start = steps_after_warmup - cooldown
    cooled = min(1.0, max(0, step_after_warmup - cooldown_start) / cooldown)  # fraction of the cooldown that is done
    match config.schedule:
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * min(1.0, step_after_warmup / steps_after_warmup)))
        case "constant":
            height = 1.0
        case "cooldown":
            height = 1 - cooled
        case "wsd":
            height = 1 - math.sqrt(cooled)
    return config.min_lr + height * (config.lr - config.min_lr)


def fitted_warmup(steps: int, total: int) -> int:
    """Return the number of warm-up steps: `steps` if the run has more than `steps` steps, else a tenth of the run."""
    return steps if steps < total else total // _RUN_PER_FITTED_WARMUP
