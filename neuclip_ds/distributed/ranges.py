"""Name ranges in a profiler's trace, by which `neuclip_ds.profiling` recognises steps, phases and collectives."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

STEP = "train step"
PHASE = "phase: "
PURPOSE = "purpose: "


def step_range() -> AbstractContextManager[object]:
    """Mark everything that counts as a training step."""
    return _range(STEP)


def phase_range(name: str) -> AbstractContextManager[object]:
    """Mark a phase of a step: forward, objective, backward or optimizer; phases do not nest."""
    return _range(PHASE + name)


def purpose_range(purpose: str) -> AbstractContextManager[object]:
    """Mark one collective, in the thread that launches it."""
    return _range(PURPOSE + purpose)


def _range(name: str) -> AbstractContextManager[object]:
    # without a profiler record_function costs some ten microseconds, this check less than one
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
