"""What happens around training steps, one hook a concern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuclip_ds.reporting.events import EventLog
from neuclip_ds.training.hooks.base import Hook
from neuclip_ds.training.hooks.checkpoints import SaveCheckpoints, StopOnSignal
from neuclip_ds.training.hooks.data import ListBadSamples, LogSamples, PrefetchShards
from neuclip_ds.training.hooks.evaluation import Evaluate, EvaluateModel
from neuclip_ds.training.hooks.health import WatchHealth
from neuclip_ds.training.hooks.metrics import ProfileSteps, ShowProgress, WriteMetrics, open_metrics
from neuclip_ds.training.hooks.remote import CopyCheckpoints
from neuclip_ds.training.hooks.replicas import CompareReplicas

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop

__all__ = ["Evaluate", "Hook", "standard_hooks"]


def standard_hooks(loop: Loop, evaluate: Evaluate | None, further: Sequence[Hook] = ()) -> list[Hook]:
    """Return the hooks of a loop in their order; the user's run before a stop and a checkpoint are decided on."""
    run = loop.context.config.run
    events = EventLog(loop.folder, loop.context.communicator.rank, loop.done)
    metrics, bad_samples, saver = open_metrics(loop), ListBadSamples(loop), SaveCheckpoints(events)
    return [
        ProfileSteps(),  # first, so that its steps hold no other hook
        PrefetchShards(),
        bad_samples,
        *([LogSamples()] if run.sample_log else []),
        WatchHealth(loop, events),
        ShowProgress(),
        WriteMetrics(metrics, bad_samples.log),
        *further,
        CompareReplicas(),
        StopOnSignal(),
        saver,
        *([EvaluateModel(evaluate, metrics, saver)] if evaluate is not None else []),
        *([CopyCheckpoints(events, run.remote)] if run.remote is not None else []),
    ]
