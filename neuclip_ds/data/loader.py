"""Load this rank's batches with worker processes, in an order that does not depend on the number of ranks or workers.

The main process sends lists of (epoch, index) pairs to the workers. The step is therefore the training loader's only
state, and resuming at any step costs no more than starting at the first step. A rank's batch is loaded in parts of
bounded size to limit the memory that prefetching uses. The pixels of the parts are never joined, because that would
copy them.
"""

import io
import itertools
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from neuclip_ds.data.dataset import PADDING, BadSample, Batch, PairDataset
from neuclip_ds.data.feature_table import StoredFeatures, join_features
from neuclip_ds.data.manifest import Manifest, indices_at
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.data.worker_pool import LoaderOptions, WorkerPool
from neuclip_ds.errors import UserError

PART_BYTES = 1 << 27  # maximum pixel bytes per part; torch would round pinned blocks up to a power of two anyway

Items = list[tuple[int, int]]  # (epoch of the row's data source, global index) of each row of a job
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """The rows that a rank loads, divided into jobs for its workers. A job is a batch or a part of a batch."""

    count: int
    items: Callable[[int], Items]  # returns the rows of a job
    describe: Callable[[int], str]  # returns a name for the batch of the n-th job (counted from 1) for messages


def train_jobs(
    order: BatchOrder, rank: int, world_size: int, epoch: int, step: int, steps: int, parts: int = 1
) -> Jobs:
    """Select a rank's B / world_size rows of each of `steps` global batches, as `parts` jobs per batch.

    The first batch is the one at step `step` (0-based) of `epoch`; if `step` equals steps_per_epoch, the jobs start
    with the next epoch. Raises UserError if the batch size is not divisible by the number of ranks.
    """
    if order.batch_size % world_size:
        raise UserError(
            f"data.batch_size={order.batch_size} is not divisible by {world_size} ranks; set it to a multiple of "
            f"{world_size}, or change the number of ranks."
        )
    first_batch = epoch * order.steps_per_epoch + step  # counted from the first batch of epoch 0
    rank_batch = order.batch_size // world_size
    first_row = rank * rank_batch  # in the global batch

    def items(job: int) -> Items:
        # docs: rows
        batch, part = divmod(job, parts)
        epoch, step = divmod(first_batch + batch, order.steps_per_epoch)
        rows = part_rows(rank_batch, parts, part)
        epochs, indices = order.epochs_and_indices(epoch, step, slice(first_row + rows.start, first_row + rows.stop))
        return list(zip(epochs.tolist(), indices.tolist(), strict=True))
        # docs: end

    def describe(number: int) -> str:
        epoch, step = divmod(first_batch + (number - 1) // parts, order.steps_per_epoch)
        return f"step {step + 1} of epoch {epoch + 1}"

    return Jobs(count=steps * parts, items=items, describe=describe)


def eval_jobs(manifest: Manifest, rank: int, world_size: int, batch_size: int) -> Jobs:
    """Select rank r's share of the manifest's n used samples: [r c, (r + 1) c), where c = ceil(n / world_size).

    Every rank has ceil(c / batch_size) batches of `batch_size` rows; padding rows have index -1.
    """
    rank_samples = -(-manifest.n_used // world_size)
    end = min((rank + 1) * rank_samples, manifest.n_used)

    def items(job: int) -> Items:
        start = rank * rank_samples + job * batch_size
        positions = np.arange(start, min(start + batch_size, end))
        indices = indices_at(manifest.starts, manifest.sizes, positions).tolist()
        padding = batch_size - len(indices)
        return [(0, index) for index in indices] + [(0, PADDING)] * padding

    batches = -(-rank_samples // batch_size)
    return Jobs(count=batches, items=items, describe="evaluation batch {}".format)


class Loader:
    """Persistent worker processes that load image-caption batches or apply functions to items.

    `pairs` maps names to datasets. The forked workers inherit these datasets, so large manifests are not pickled.
    """

    def __init__(self, options: LoaderOptions, pairs: Mapping[str, PairDataset] | None = None) -> None:
        self._pairs = pairs or {}
        self._pool = WorkerPool(self._do_job, options)

    def batches(self, source: str, jobs: Jobs) -> Generator[Batch, None, None]:
        """Yield the batches or parts that `jobs` selects from the `source` dataset.

        Raises the same errors as `WorkerPool.run`.
        """
        to_load = (_LoadBatch(source=source, items=jobs.items(job)) for job in range(jobs.count))
        return self._pool.run(to_load, jobs.describe, self._pairs[source].folder)

    def map(
        self, function: Callable[[T], R], groups: Iterable[list[T]], folder: Path
    ) -> Generator[list[R], None, None]:
        """Apply a function to each item, and yield a list of results for each group.

        The function, its arguments and its results must be picklable. Error messages name `folder`, the items' folder.
        Raises the same errors as `WorkerPool.run`.
        """
        to_apply = (_Apply(function=function, items=items) for items in groups)
        with closing(self._pool.run(to_apply, "part {} of an evaluation set".format, folder)) as pickled_results:
            yield from map(pickle.loads, pickled_results)

    def close(self) -> None:
        """Stop the workers, if there are any."""
        self._pool.close()

    def _do_job(self, job: "_LoadBatch | _Apply") -> Batch | bytes:
        return job.run(self._pairs)


@dataclass(frozen=True, kw_only=True)
class _LoadBatch:
    """A job that loads rows of the `source` dataset."""

    source: str
    items: Items

    def run(self, pairs: Mapping[str, PairDataset]) -> Batch:
        """Return the batch."""
        return pairs[self.source].batch(self.items)


@dataclass(frozen=True, kw_only=True)
class _Apply:
    """A job that applies a function to items."""

    function: Callable[[Any], Any]
    items: list[Any]

    def run(self, pairs: Mapping[str, PairDataset]) -> bytes:
        """Return the pickled list of results."""
        results = [self.function(item) for item in self.items]
        buffer = io.BytesIO()
        _TensorPickler(buffer).dump(results)
        return buffer.getvalue()


class _TensorPickler(pickle.Pickler):
    """A pickler that copies the bytes of tensors, because sharing a tensor's memory would use a file descriptor."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


IN_PROCESS = Loader(LoaderOptions(workers=0))  # has no workers and no state


def part_count(rows: int, image_size: int) -> int:
    """Return the number of parts into which a batch of (rows, 3, image_size, image_size) uint8 pixels is split."""
    return parts_of_rows(rows, 3 * image_size**2)


def parts_of_rows(rows: int, row_bytes: int) -> int:
    """Return the number of parts into which a batch of `rows` rows of `row_bytes` bytes is split."""
    most_rows_per_part = max(1, PART_BYTES // row_bytes)
    return -(-rows // most_rows_per_part)


def part_rows(rows: int, count: int, number: int) -> slice:
    """Return the rows of part `number` when `rows` rows are split into `count` parts of nearly equal size."""
    return slice(rows * number // count, rows * (number + 1) // count)


class RankBatch:
    """A batch of b rows, split into parts.

    `index` (b,), `valid` (b,), `bad` and the features in `stored` are concatenated over the parts.
    """

    def __init__(self, parts: Sequence[Batch]) -> None:
        self._parts: list[Batch | None] = list(parts)
        self._starts = [0, *itertools.accumulate(len(part.index) for part in parts)]
        self.index = torch.cat([part.index for part in parts])
        self.valid = torch.cat([part.valid for part in parts])
        self.stored: dict[str, StoredFeatures] = {}  # by the name of the table
        for name in parts[0].stored:
            self.stored[name] = join_features([part.stored[name] for part in parts])
        if parts[0].index.is_pinned():
            self.index = self.index.pin_memory()
            self.valid = self.valid.pin_memory()
            self.stored = {name: features.pin_memory() for name, features in self.stored.items()}
        self.bad: tuple[BadSample, ...] = tuple(sample for part in parts for sample in part.bad)

    def __len__(self) -> int:
        return self._starts[-1]

    def pieces(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Return the rows as one (pixels, tokens) pair of views per part, with the shapes and dtypes of `Batch`.

        Raises RuntimeError if a part that contains some of the rows has been released.
        """
        views = []
        for part, start, stop in zip(self._parts, self._starts[:-1], self._starts[1:], strict=True):
            if start < rows.stop and rows.start < stop:
                if part is None:
                    raise RuntimeError(f"Some of the rows [{rows.start}, {rows.stop}) of a batch have been released.")
                rows_of_part = slice(max(rows.start - start, 0), min(rows.stop, stop) - start)
                views.append((part.image[rows_of_part], part.tokens[rows_of_part]))
        return views

    def release(self, rows: int) -> None:
        """Free the pixels and the tokens of all parts that are entirely within the first `rows` rows."""
        for number, stop in enumerate(self._starts[1:]):
            if stop <= rows:
                self._parts[number] = None


def join_parts(parts: Iterator[Batch], count: int) -> Iterator[RankBatch]:
    """Yield batches of `count` consecutive parts each, without copying the parts' pixels."""
    while parts_of_batch := list(itertools.islice(parts, count)):
        batch = RankBatch(parts_of_batch)
        del parts_of_batch  # so that only the batch keeps the pixels alive
        yield batch
