"""Hooks that every loop uses: shard prefetching, progress and stop signals."""

from __future__ import annotations

import logging
import math
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from neuclip_ds.data.prefetch import Prefetcher, early_samples, shards_ahead
from neuclip_ds.distributed.stop_signals import deferring, take_signal
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.records import is_log_step

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

log = logging.getLogger(__name__)

_PROGRESS_INTERVAL = 10.0  # seconds between progress lines


class PrefetchShards(Hook):
    """Prefetches the remote shards that a node needs; runs on one rank of each node."""

    def __init__(self) -> None:
        self._prefetcher: Prefetcher | None = None

    def start(self, loop: Loop) -> None:
        communicator = loop.context.communicator
        data = loop.context.data
        ranks_of_node = communicator.ranks_of_node()
        if data.loading.cache is None or communicator.rank != ranks_of_node[0] or loop.done == loop.total:
            return
        order = data.order
        rank_batch = order.batch_size // communicator.world_size
        rows = [slice(rank * rank_batch, (rank + 1) * rank_batch) for rank in ranks_of_node]
        epoch, step = divmod(loop.done, order.steps_per_epoch)
        prefetcher = Prefetcher(
            data.loading.cache,
            partial(shards_ahead, order, epoch, step, rows),
            data.manifest.shards,
            begin=loop.done,
            end=loop.total,
            ahead=order.steps_per_epoch,
            early_samples=early_samples(data.loading.cache, data.manifest, data.loading.captions, order, rows),
        )
        self._prefetcher = loop.resources.enter_context(prefetcher)

    def before_step(self, loop: Loop) -> None:
        if self._prefetcher is not None:
            self._prefetcher.advance(loop.done)


class ShowProgress(Hook):
    """Logs the step, loss, temperature, throughput and remaining time on rank 0, every 10 seconds and at the end.

    The loss is that of the last full batch. The other ranks log only warnings.
    """

    def start(self, loop: Loop) -> None:
        self._loss = math.nan
        self._next_line = -math.inf

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if not result.is_partial_batch:
            self._loss = result.loss
        now = time.monotonic()
        if now < self._next_line and loop.done < loop.total:
            return
        self._next_line = now + _PROGRESS_INTERVAL
        rate = "?"
        remaining = "?"
        if math.isfinite(result.samples_per_second):
            rate = f"{result.samples_per_second:,.0f}"
            samples = (loop.total - result.step) * loop.context.config.data.batch_size
            remaining = str(timedelta(seconds=round(samples / result.samples_per_second)))
        tau = "" if result.tau is None else f"  tau {result.tau:.4f}"
        log.info(
            "step %d/%d  loss %.4f%s  %s samples/s  ETA %s",
            result.step,
            loop.total,
            self._loss,
            tau,
            rate,
            remaining,
        )


class StopOnSignal(Hook):
    """Stops all ranks after the same step, with a checkpoint, if any rank has received a stop signal."""

    def start(self, loop: Loop) -> None:
        loop.resources.enter_context(deferring())

    def after_step(self, loop: Loop, result: StepResult) -> None:
        """After steps that log metrics, gather all ranks' stop signals; if any rank received one, all ranks stop."""
        if not is_log_step(loop):
            return
        for number in loop.context.communicator.gather_objects(take_signal()):
            if number is not None:
                loop.stop_requested = True
                loop.stop_signal = number
