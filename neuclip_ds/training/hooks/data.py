"""Follow the batches: fetch remote shards ahead, list bad samples, log sample indices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.prefetch import Prefetcher
from neuclip_ds.data.rank_batch import RankBatch
from neuclip_ds.reporting.sample_log import SampleLog, drop_samples_beyond
from neuclip_ds.training.hooks.base import Hook

if TYPE_CHECKING:
    from neuclip_ds.training.loop import Loop, StepResult


class PrefetchShards(Hook):
    """Fetch the remote shards that a node needs ahead of training, on one rank of each node."""

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
            partial(loop.position.shards_ahead, loop.done, rows),
            data.manifest.shards,
            begin=loop.done,
            end=loop.total,
            ahead=data.order.steps_per_epoch,
        )
        self._prefetcher = loop.resources.enter_context(prefetcher)

    def before_step(self, loop: Loop) -> None:
        if self._prefetcher is not None:
            self._prefetcher.advance(loop.done)


class ListBadSamples(Hook):
    """Keep bad_samples.jsonl, and end the run when too many samples are bad."""

    def __init__(self, loop: Loop) -> None:
        context = loop.context
        self.log = BadSampleLog(
            loop.folder, context.config.data.max_bad_fraction, writes=context.communicator.rank == 0
        )

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self.log.record(batch)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        if result.logs or result.saves:
            self.log.merge(loop.context.communicator.gather_objects)

    def state(self, loop: Loop) -> dict[str, Any]:
        self.log.merge(loop.context.communicator.gather_objects)
        return {"seen": self.log.seen, "causes": dict(self.log.causes)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.log.restore(state["seen"], state["causes"])


class LogSamples(Hook):
    """Write this rank's sample indices of every step to samples/ (`run.sample_log`)."""

    def start(self, loop: Loop) -> None:
        folder, communicator = loop.folder / "samples", loop.context.communicator

        def drop() -> None:
            with explain_disk(folder):
                drop_samples_beyond(folder, loop.done)

        def open_log() -> SampleLog:
            with explain_disk(folder):
                return SampleLog(folder, communicator.rank)

        communicator.on_rank_zero(drop)
        self._log = loop.resources.enter_context(communicator.on_every_rank(open_log))

    def on_batch(self, loop: Loop, batch: RankBatch) -> None:
        self._log.write(loop.done + 1, batch.index.tolist())
