"""The hooks that every loop uses: shard prefetching, health checks, progress, records, stop signals and checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from neuclip_ds.checkpoint.integrity import SaveFailed
from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.data.prefetch import Prefetcher, shards_ahead
from neuclip_ds.distributed.stop_signals import deferring, take_signal
from neuclip_ds.errors import UserError
from neuclip_ds.files import explain_disk
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.health import WatchHealth

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # consecutive failed saves that end the run
_SECONDS = 10.0  # seconds between progress lines


def standard_hooks(saver: SaveCheckpoints) -> list[Hook]:
    """Return the hooks that every loop uses, in the order in which they run."""
    return [PrefetchShards(), WatchHealth(), ShowProgress(), WriteRecords(), StopOnSignal(), saver]


class PrefetchShards(Hook):
    """Prefetches the remote shards that a node needs; runs on one rank of each node."""

    _prefetcher: Prefetcher | None = None

    def start(self, loop: Loop) -> None:
        context = loop.context
        communicator, data = context.communicator, context.data
        node = communicator.ranks_of_node()
        if data.loading.cache is None or communicator.rank != node[0] or loop.done == loop.total:
            return
        rank_batch = data.order.batch_size // communicator.world_size
        rows = [slice(rank * rank_batch, (rank + 1) * rank_batch) for rank in node]
        prefetcher = Prefetcher(
            data.loading.cache,
            partial(shards_ahead, data.order, *divmod(loop.done, data.order.steps_per_epoch), rows),
            data.manifest.shards,
            begin=loop.done,
            end=loop.total,
            ahead=data.order.steps_per_epoch,
        )
        self._prefetcher = loop.resources.enter_context(prefetcher)

    def before_step(self, loop: Loop) -> None:
        if self._prefetcher is not None:
            self._prefetcher.advance(loop.done)


class WriteRecords(Hook):
    """Writes metrics, events and bad samples, and ends the run if too many samples are bad.

    Metrics are written every `run.log_every` steps, with the throughput and the fractions of time spent waiting.
    """

    _counts: Mapping[str, Any] = {"seen": 0, "causes": {}}  # from the checkpoint

    def load_state(self, state: dict[str, Any]) -> None:
        self._counts = state

    def state(self, loop: Loop) -> dict[str, Any]:
        self._bad_samples.merge(loop.context.communicator.gather_objects)
        return {"seen": self._bad_samples.seen, "causes": dict(self._bad_samples.causes)}

    def start(self, loop: Loop) -> None:
        """Open the files, which only rank 0 writes, and drop the records of steps after the current step."""
        communicator, most = loop.context.communicator, loop.context.config.data.max_bad_fraction
        writes = communicator.rank == 0

        def open_files() -> MetricsLog | None:
            with explain_disk(loop.folder):
                loop.events.resume(loop.done)
                self._bad_samples = BadSampleLog(loop.folder, most, writes=writes)
                return MetricsLog(loop.folder, loop.done or None) if writes else None

        loop.metrics = communicator.on_every_rank(open_files)
        if loop.metrics is not None:
            loop.resources.enter_context(loop.metrics)
        self._bad_samples.restore(**self._counts)
        self._begin_interval(loop)

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self._bad_samples.record(batch)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.logs or result.saves:
            self._bad_samples.merge(loop.context.communicator.gather_objects)
        self._waited += result.waited
        if not result.logs:
            return
        if loop.metrics is not None:
            # a small last batch has fewer negatives, so its values would appear as jumps in every curve
            of_step = {"lr": result.lr, "skipped_steps": result.skipped} if result.rest else result.metrics
            loop.metrics.write(result.step, {**of_step, **self._of_interval(loop, result)})
        self._begin_interval(loop)

    def _of_interval(self, loop: Loop, result: StepResult) -> dict[str, float]:
        passed = time.perf_counter() - self._since
        found: dict[str, float] = {f"bad_samples/{cause}": n for cause, n in self._bad_samples.causes.items()}
        found["samples_per_second"], found["data_wait_share"] = result.samples_per_second, self._waited / passed
        communicator = loop.context.communicator
        if communicator.world_size > 1:
            found["objective_communication_share"] = (communicator.seconds() - self._communicated) / passed
        return found

    def _begin_interval(self, loop: Loop) -> None:
        self._waited, self._since = 0.0, time.perf_counter()
        self._communicated = loop.context.communicator.seconds()


class ShowProgress(Hook):
    """Logs the step, loss, temperature, throughput and remaining time on rank 0, every 10 seconds and at the end.

    The loss is that of the last full batch. The other ranks log only warnings.
    """

    def start(self, loop: Loop) -> None:
        self._loss, self._next_line = math.nan, -math.inf

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self._loss = self._loss if result.rest else result.loss
        now = time.monotonic()
        if now < self._next_line and not result.last:
            return
        self._next_line = now + _SECONDS
        rate, samples = result.samples_per_second, (loop.total - result.step) * loop.context.config.data.batch_size
        known = math.isfinite(rate)
        left = timedelta(seconds=round(samples / rate)) if known else "?"
        log.info(
            "step %d/%d  loss %.4f  tau %.4f  %s samples/s  ETA %s",
            *(result.step, loop.total, self._loss, result.tau, f"{rate:,.0f}" if known else "?", left),
        )


class StopOnSignal(Hook):
    """Stops all ranks after the same step, with a checkpoint, if any rank has received a stop signal."""

    def start(self, loop: Loop) -> None:
        loop.resources.enter_context(deferring())

    def after_step(self, loop: Loop, result: StepResult) -> None:
        """After steps that log metrics, gather all ranks' stop signals; if any rank received one, all ranks stop."""
        received = loop.context.communicator.gather_objects(take_signal()) if result.logs else []
        for number in filter(None, received):
            loop.stop_requested, loop.stop_signal = True, number


class SaveCheckpoints(Hook):
    """Saves a checkpoint every `run.checkpoint_every` steps, after the last step, and before a requested stop.

    If a save fails, training continues until the next save; three consecutive failures end the run.
    """

    _failed = 0  # consecutive failed saves

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.saves or loop.stop_requested:
            self.save(loop, last=result.last or loop.stop_requested)

    def save(self, loop: Loop, last: bool = False) -> None:
        """Save now; raise `UserError` if the save fails and is the last save or the third consecutive failure."""
        loop.events.merge(loop.context.communicator.gather_objects)
        try:
            loop.save()
            self._failed = 0
        except SaveFailed as error:
            self._failed += 1
            if last or self._failed >= _ATTEMPTS:
                raise UserError(
                    f"{error} {self._failed} saves in a row have failed. Free disk space and check the disk; the same "
                    "command then resumes from the newest checkpoint."
                ) from error
            message = f"{error} Training continues without this checkpoint."
            loop.events.add(loop.done, "save_failed", message, shared=True)
