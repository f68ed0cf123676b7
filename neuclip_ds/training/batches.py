"""Load batches in worker processes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple

from neuclip_ds.data.dataset import PairDataset
from neuclip_ds.data.images import EvalTransform, RandomCrop
from neuclip_ds.data.loader import Loader, LoaderOptions, RankBatch, join_parts, part_count, train_jobs
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.models.tokenizer import ModelTokenizer


class TrainingData(NamedTuple):
    """The training samples of a run, their order, and how to load them."""

    manifest: Manifest
    order: BatchOrder
    loading: LoaderOptions
    transform: RandomCrop | EvalTransform
    tokenizer: ModelTokenizer

    def record(self) -> dict[str, Any]:
        """Return the data's content hash and held-out counts, which a checkpoint stores."""
        return {"hash": self.manifest.content_hash, "held_out": sorted(self.manifest.held_out.items())}

    def batches(self, communicator: Communicator, begin: int, steps: int) -> Generator[RankBatch, None, None]:
        """Yield a rank's batches for `steps` training steps, starting at step `begin`, counted from 0."""
        order = self.order
        epoch, step = divmod(begin, order.steps_per_epoch)
        parts = part_count(order.batch_size // communicator.world_size, self.transform.image_size)
        jobs = train_jobs(order, communicator.rank, communicator.world_size, epoch, step, steps, parts)
        options = self.loading
        pairs = PairDataset(self.manifest, self.transform, self.tokenizer, order.seed, options.captions, options.cache)
        with closing(Loader(options, {"train": pairs})) as loader:
            yield from join_parts(loader.batches("train", jobs), parts)
