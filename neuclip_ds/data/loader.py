"""Load this rank's batches with worker processes, in an order independent of the numbers of ranks and workers.

The main process sends (epoch, index) lists to the workers. The step is therefore the only state of a training loader,
and resuming at any step costs no more than starting at the first.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from neuclip_ds.data.dataset import PADDING, Batch, PairDataset, Tokenize
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import BatchOrder
from neuclip_ds.data.rank_batch import part_rows
from neuclip_ds.data.transforms import ImageTransform
from neuclip_ds.data.worker_pool import LoaderOptions, WorkerPool
from neuclip_ds.errors import UserError

Items = list[tuple[int, int]]  # (visit, index) of each row of a rank's batch; the visit is nearly always the epoch


class Jobs(NamedTuple):
    """A rank's rows of every batch, in the portions that a worker loads at a time: whole batches, or parts of them."""

    number: int  # of jobs
    items: Callable[[int], Items]  # the rows of a job
    describe: Callable[[int], str]  # name of a job's batch for messages


def train_jobs(
    order: BatchOrder, rank: int, world_size: int, epoch: int, step: int, steps: int, parts: int = 1
) -> Jobs:
    """Select a rank's rows of `steps` global batches from (epoch, step) on, across epochs, each in `parts` jobs."""
    if order.batch_size % world_size:
        raise UserError(
            f"data.batch_size={order.batch_size} is not divisible by {world_size} ranks; choose a multiple of them."
        )
    first, share = epoch * order.steps_per_epoch + step, order.batch_size // world_size

    def items(number: int) -> Items:
        batch, part = divmod(number, parts)
        epoch, step = divmod(first + batch, order.steps_per_epoch)
        rows = part_rows(share, parts, part)
        visits, indices = order.visits(epoch, step, slice(rank * share + rows.start, rank * share + rows.stop))
        return list(zip(visits.tolist(), indices.tolist(), strict=True))

    def describe(number: int) -> str:
        epoch, step = divmod(first + number // parts, order.steps_per_epoch)
        return f"step {step} of epoch {epoch}"

    return Jobs(steps * parts, items, describe)


def eval_jobs(manifest: Manifest, rank: int, world_size: int, batch_size: int) -> Jobs:
    """Select rank r's samples [r c, (r + 1) c), c = ceil(n / world_size), of the n in use, in equally many batches."""
    share = -(-manifest.n_used // world_size)
    end = min((rank + 1) * share, manifest.n_used)

    def items(number: int) -> Items:
        start = rank * share + number * batch_size
        indices = manifest.used(np.arange(start, min(start + batch_size, end))).tolist()
        return [(0, index) for index in indices] + [(0, PADDING)] * (batch_size - len(indices))

    return Jobs(-(-share // batch_size), items, lambda number: f"evaluation batch {number}")


def train_loader(
    manifest: Manifest,
    order: BatchOrder,
    transform: ImageTransform,
    tokenize: Tokenize,
    *,
    rank: int = 0,
    world_size: int = 1,
    epoch: int = 0,
    step: int = 0,
    steps: int,
    parts: int = 1,
    options: LoaderOptions = LoaderOptions(),
) -> Iterator[Batch]:
    """Iterate over this rank's batches of (B / world_size) rows from `step` of `epoch` on, across epochs.

    Args:
        epoch, step: where to start; `step` counts within the epoch and may be steps_per_epoch (the next epoch).
        steps: number of batches.
        parts: number of consecutive parts that each batch comes in, as `part_rows` cuts it; workers load parts.

    Raises:
        UserError: the batch is not divisible by the ranks, a shard has changed, or workers repeatedly die or exceed
            `options.timeout`.
    """
    jobs = train_jobs(order, rank, world_size, epoch, step, steps, parts)
    return _load(manifest, transform, tokenize, order.seed, jobs, options)


def eval_loader(
    manifest: Manifest,
    transform: ImageTransform,
    tokenize: Tokenize,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int,
    options: LoaderOptions = LoaderOptions(),
) -> Iterator[Batch]:
    """Iterate over the r-th contiguous part of the samples on rank r, each sample once over all ranks.

    All ranks yield ceil(ceil(n / world_size) / batch_size) batches of `batch_size` rows; padding has index -1.
    """
    return _load(manifest, transform, tokenize, 0, eval_jobs(manifest, rank, world_size, batch_size), options)


def pair_dataset(
    manifest: Manifest, transform: ImageTransform, tokenize: Tokenize, seed: int, options: LoaderOptions
) -> PairDataset:
    """Return the pairs of a manifest as `options` say; `seed` is that of augmentation and choice of captions."""
    return PairDataset(
        manifest, transform, tokenize, seed=seed, captions=options.captions, reader=options.reader, cache=options.cache
    )


def _load(
    manifest: Manifest,
    transform: ImageTransform,
    tokenize: Tokenize,
    seed: int,
    jobs: Jobs,
    options: LoaderOptions,
) -> Iterator[Batch]:
    dataset = pair_dataset(manifest, transform, tokenize, seed, options)

    def describe(number: int) -> str:
        return f"{jobs.describe(number)} from {options.workers} loader processes (shards in {dataset.folder})"

    with closing(WorkerPool(dataset.__getitems__, options)) as pool:
        yield from pool.run(map(jobs.items, range(jobs.number)), describe)
