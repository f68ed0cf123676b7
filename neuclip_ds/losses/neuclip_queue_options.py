"""Options and settings of this project's `neuclip_queue`; the equations are in neuclip_queue.py."""

from __future__ import annotations

from pydantic import Field

from neuclip_ds.losses.method import Method
from neuclip_ds.section import Section


class QueueConfig(Section):
    size: int = Field(4096, ge=1, le=1 << 24)
    """Number of samples m in the queue."""
    kappa: float = Field(1.0, gt=0, le=1e6)
    """Weight of the queue's estimate relative to the batch's estimate, whose weight is 1."""


METHODS = {
    "neuclip_queue": Method(
        builder="neuclip_queue.neuclip_queue",
        sections=("queue",),
        state_options=("queue.size",),
        defaults={"temperature": {"initial": 0.07, "rule": "learned"}},
        has_temperature_rule=True,
    ),
}
