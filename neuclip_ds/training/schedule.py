"""The number of a run's steps, and the learning rate of each."""

import math

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.data.mixture import BatchOrder

_FITTED_WARMUP = 10  # a warm-up that does not fit into the run becomes this fraction of it
_COOLDOWN = 5  # by default the last fifth


def run_length(order: BatchOrder, epochs: float, max_steps: int | None = None) -> int:
    """Return the number of steps after which training ends: `max_steps`, or the steps of all epochs."""
    return max_steps or max(round(epochs * order.steps_per_epoch), 1)


def is_rest(order: BatchOrder, number: int) -> bool:
    """Return whether a step's batch is the last of an epoch and less than half full."""
    step = number % order.steps_per_epoch
    return 0 < step == order.steps_per_epoch - 1 and 2 * order.last_batch_size < order.batch_size


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step: lr (step + 1) / warmup, then `config.schedule` from lr to min_lr at `total`.

    Warm-up, cosine and cooldown have the form of open_clip's. `wsd` is warm-up, stable, decay (Hu et al. 2024,
    MiniCPM), with the decay of Haegele et al. 2024, arXiv:2405.18392.
    """
    warmup = fitted_warmup(config.warmup_steps, total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    cooldown = max(1, total // _COOLDOWN) if config.cooldown_steps is None else config.cooldown_steps
    step, total = step - warmup, max(1, total - warmup)
    cooldown = min(cooldown, total)
    cooled = min(1.0, max(0, step - (total - cooldown)) / cooldown)  # share of the cooldown that is done
    match config.schedule:
        case "cosine":
            height = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        case "constant":
            height = 1.0
        case "cooldown":
            height = 1 - cooled
        case "wsd":
            height = 1 - math.sqrt(cooled)
    return config.min_lr + height * (config.lr - config.min_lr)


def fitted_warmup(steps: int, total: int) -> int:
    """Return the warm-up steps in a run of `total`: as given if shorter than the run, else a tenth of it."""
    return steps if steps < total else total // _FITTED_WARMUP
