"""Learning-rate schedules as pure functions of the step: a linear warm-up, then one of `SHAPES`."""

import math
from collections.abc import Callable, Mapping

from neuclip_ds.config import OptimizerConfig

_FITTED_WARMUP = 10  # a warm-up that does not fit into the run becomes this part of it: a tenth
_COOLDOWN = 5  # by default the last fifth


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step: lr (step + 1) / warmup, then `config.schedule` from lr to min_lr at `total`.

    Warm-up, cosine and cooldown have the form of open_clip's.
    """
    warmup = fitted_warmup(config.warmup_steps, total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    cooldown = max(1, total // _COOLDOWN) if config.cooldown_steps is None else config.cooldown_steps
    height = SHAPES[config.schedule](step - warmup, max(1, total - warmup), cooldown)
    return config.min_lr + height * (config.lr - config.min_lr)


def fitted_warmup(steps: int, total: int) -> int:
    """Return the steps of warm-up in a run of `total`: as given where shorter than the run, else a tenth of it."""
    return steps if steps < total else total // _FITTED_WARMUP


def _cosine(step: int, total: int, cooldown: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))


def _constant(step: int, total: int, cooldown: int) -> float:
    return 1.0


def _cooldown(step: int, total: int, cooldown: int) -> float:
    return 1 - _progress(step, total, cooldown)


def _wsd(step: int, total: int, cooldown: int) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM), with the decay of Haegele et al. 2024, arXiv:2405.18392."""
    return 1 - math.sqrt(_progress(step, total, cooldown))


def _progress(step: int, total: int, cooldown: int) -> float:
    """Return the share of the last `cooldown` of `total` steps that is done, in [0, 1]."""
    length = min(cooldown, total)
    return min(1.0, max(0, step - (total - length)) / length)


SHAPES: Mapping[str, Callable[[int, int, int], float]] = {
    "cosine": _cosine,
    "constant": _constant,
    "cooldown": _cooldown,
    "wsd": _wsd,
}
"""`optimizer.schedule` -> (step, total, cooldown) after the warm-up -> height in [0, 1] above min_lr."""
