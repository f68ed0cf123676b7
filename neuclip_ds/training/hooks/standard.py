"""Hooks that every loop uses: shard prefetching, garbage collection and progress."""

from __future__ import annotations

import gc
import logging
import math
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from neuclip_ds.data.prefetch import Prefetcher, early_samples, shards_ahead
from neuclip_ds.training.hooks import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.trainer import Loop, StepResult

log = logging.getLogger(__name__)

_COLLECT_EVERY = 100  # steps
_FIRST_INTERVAL = 2.0  # seconds between the first progress lines
_PROGRESS_INTERVAL = 10.0  # seconds between later progress lines
_FIRST_LINES = 30  # number of progress lines after which the interval changes


class PrefetchShards(Hook):
    """Prefetches the remote shards and stored features that a node needs; runs on one rank of each node."""

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
        samples = None
        if data.reads_shards:
            samples = early_samples(data.loading.cache, data.manifest, data.loading.captions, order, rows)
        prefetcher = Prefetcher(
            data.loading.cache,
            partial(shards_ahead, order, epoch, step, rows),
            data.manifest.shards,
            begin=loop.done,
            end=loop.total,
            ahead=order.steps_per_epoch,
            early_samples=samples,
            tables=data.tables.values(),
            reads_shards=data.reads_shards,
        )
        self._prefetcher = loop.resources.enter_context(prefetcher)

    def before_step(self, loop: Loop) -> None:
        if self._prefetcher is not None:
            self._prefetcher.advance(loop.done)


class CollectGarbage(Hook):
    """Collects reference cycles every 100 steps, because Python's own schedule pauses ranks at different steps.

    A collection visits all objects that the garbage collector tracks, which takes up to half a second after the set-up
    of a run. While one rank collects, the other ranks wait for it. The objects of the set-up are therefore exempt, and
    a collection during training visits only younger objects.
    """

    def __init__(self) -> None:
        self._controls = False  # if false, the user controls the collections

    def start(self, loop: Loop) -> None:
        self._controls = gc.isenabled()
        if not self._controls:
            return
        gc.collect()
        gc.freeze()
        gc.disable()
        loop.resources.callback(gc.enable)
        loop.resources.callback(gc.unfreeze)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if self._controls and loop.done % _COLLECT_EVERY == 0:
            gc.collect(1)


class ShowProgress(Hook):
    """Logs the step, loss, temperature, throughput and remaining time on rank 0, every 10 seconds and at the end.

    The first 30 lines come every 2 seconds, or every step if steps take longer. The loss is that of the last step with
    a batch that was not partial (`StepResult.is_partial_batch`). The other ranks log only warnings.
    """

    def __init__(self) -> None:
        self._loss = math.nan
        self._next_line = -math.inf
        self._lines = 0

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if not result.is_partial_batch:
            self._loss = result.loss
        now = time.monotonic()
        if now < self._next_line and loop.done < loop.total:
            return
        self._next_line = now + (_FIRST_INTERVAL if self._lines < _FIRST_LINES else _PROGRESS_INTERVAL)
        self._lines += 1
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
