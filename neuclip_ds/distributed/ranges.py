"""Named ranges in a profiler's trace, by which `neuclip_ds.profiling` tells steps, phases and collectives apart."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

STEP = "train step"
PHASE = "phase: "
PURPOSE = "purpose: "


def step_range() -> AbstractContextManager[object]:
    """Around everything that a training step is charged for."""
    return _range(STEP)


def phase_range(name: str) -> AbstractContextManager[object]:
    """Around a part of a step: forward, objective, backward or optimizer; phases do not nest."""
    return _range(PHASE + name)


def purpose_range(purpose: str) -> AbstractContextManager[object]:
    """Around one collective, in the thread that launches it."""
    return _range(PURPOSE + purpose)


def _range(name: str) -> AbstractContextManager[object]:
    # an unwatched record_function costs some ten microseconds, this question less than one
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
