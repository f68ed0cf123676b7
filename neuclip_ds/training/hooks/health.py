"""Report loss spikes, skipped updates, divergence and slow data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuclip_ds.data.rank_batch import RankBatch
from neuclip_ds.errors import RollBack, TrainingDiverged
from neuclip_ds.reporting.events import EventLog
from neuclip_ds.reporting.health import SampleLookup, StepHealth
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class WatchHealth(Hook):
    """Hand every step to `StepHealth`, whose findings go to the log and to events.jsonl."""

    def __init__(self, loop: Loop, events: EventLog) -> None:
        context, position = loop.context, loop.position
        # the order is a pure function, so every rank knows which samples all ranks saw
        samples = SampleLookup(
            lambda step: position.batch(step - 1).tolist(),
            lambda index: context.data.manifest.shards[context.data.manifest.locate(index)[0]].path,
        )
        config = context.config
        self._health = StepHealth(
            events, samples, context.communicator.rank, config.data.workers, config.run.max_skipped
        )
        self._step = loop.done

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self._step = loop.done + 1

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._health.check_times(result.step, result.waited, result.seconds, result.batch.index.tolist())
        if result.overflowed:
            self._health.report_overflow(result.step, result.metrics["loss_scale"])
            return
        problem = self._health.check_update(result.step, result.applied, lambda: result.metrics, result.not_finite)
        if problem is not None:
            loop.roll_back(problem)
        if result.applied and not result.rest:
            self._health.check_loss(result.step, result.loss, lambda: result.metrics)

    def close(self, loop: Loop, error: BaseException | None) -> None:
        if isinstance(error, RollBack):
            step = int(error.checkpoint.name.rpartition("_")[2])  # later events are dropped as those of repeated steps
            self._health.rolled_back(step, error)
        elif isinstance(error, TrainingDiverged):
            self._health.diverged(self._step, error)
