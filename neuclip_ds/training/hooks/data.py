"""Follow the batches: fetch remote shards ahead, list bad samples, log sample indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.prefetch import Prefetcher
from neuclip_ds.reporting.sample_log import SampleLog, drop_samples_beyond
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class PrefetchShards(Hook):
    """Fetch the remote shards that a node needs ahead of training, on one rank of each node."""

    def __init__(self) -> None:
        self._prefetcher: Prefetcher | None = None

    def start(self, loop: Loop) -> None:
        context = loop.context
        communicator, cache, order = context.communicator, context.data.loading.cache, context.data.order
        node = communicator.ranks_of_node()
        if cache is None or communicator.rank != node[0] or loop.done == loop.total:
            return
        epoch, step = loop.position.at(loop.done)
        # batches of the order that were no steps of this run, as the data grew in between
        self._offset = epoch * order.steps_per_epoch + step - loop.done
        rank_batch = order.batch_size // communicator.world_size
        self._prefetcher = Prefetcher(
            cache,
            order,
            context.data.manifest.shards,
            epoch=epoch,
            step=step,
            rows=slice(node[0] * rank_batch, (node[-1] + 1) * rank_batch),
            total_steps=self._offset + loop.total,
        )
        self._prefetcher.__enter__()

    def before_step(self, loop: Loop) -> None:
        if self._prefetcher is not None:
            self._prefetcher.advance(self._offset + loop.done)

    def close(self, loop: Loop, error: BaseException | None) -> None:
        if self._prefetcher is not None:
            self._prefetcher.__exit__(None, None, None)


class ListBadSamples(Hook):
    """Keep bad_samples.jsonl, and end the run when too many samples are bad."""

    def __init__(self, loop: Loop) -> None:
        context = loop.context
        self.log = BadSampleLog(
            loop.folder, context.config.data.max_bad_fraction, writes=context.communicator.rank == 0
        )

    def on_batch(self, loop: Loop, batch: Batch) -> None:
        self.log.record(batch)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.logs or result.saves:
            self.log.merge(loop.context.communicator.gather_objects)


class LogSamples(Hook):
    """Write this rank's sample indices of every step to samples/ (`run.sample_log`)."""

    def __init__(self) -> None:
        self._log: SampleLog | None = None

    def start(self, loop: Loop) -> None:
        folder, communicator = loop.folder / "samples", loop.context.communicator
        communicator.on_rank_zero(lambda: drop_samples_beyond(folder, loop.done))
        self._log = SampleLog(folder, communicator.rank)
        self._log.__enter__()

    def on_batch(self, loop: Loop, batch: Batch) -> None:
        if self._log is not None:
            self._log.write(loop.done + 1, batch.index.tolist())

    def close(self, loop: Loop, error: BaseException | None) -> None:
        if self._log is not None:
            self._log.__exit__(None, None, None)
