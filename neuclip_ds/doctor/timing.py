"""Time an operation on a device."""

import time
from collections.abc import Callable

import torch

_BUDGET = 0.5  # seconds


def seconds_of(work: Callable[[], object], device: torch.device, budget: float = _BUDGET) -> float:
    """Return the mean seconds of a call, over as many as take about `budget` seconds."""
    once = mean_seconds(work, device, 1)
    return mean_seconds(work, device, max(1, min(1000, round(budget / max(once, 1e-6)))))


def mean_seconds(work: Callable[[], object], device: torch.device, count: int) -> float:
    """Return the mean seconds of `count` calls after one that does not count."""
    work()
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        work()
    _synchronize(device)
    return (time.perf_counter() - began) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
