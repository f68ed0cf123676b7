"""Load this rank's batches with worker processes, in an order independent of the numbers of ranks and workers.

The main process sends (epoch, index) lists to the workers. The step is therefore the only state of training's loader,
and resuming at any step costs no more than starting at the first. A rank's batch comes in parts of bounded size, which
bounds the memory of prefetched batches. Parts are not joined: that would copy all pixels.
"""

import io
import itertools
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from neuclip_ds.data.dataset import PADDING, BadSample, Batch, PairDataset
from neuclip_ds.data.manifest import Manifest, indices_at
from neuclip_ds.data.mixture import BatchOrder
from neuclip_ds.data.worker_pool import LoaderOptions, WorkerPool
from neuclip_ds.errors import UserError

PART_BYTES = 1 << 27  # bytes of pixels; a power of two, to which torch rounds pinned blocks up

Items = list[tuple[int, int]]  # (visit, index) of each row of a rank's batch; the visit is nearly always the epoch
T = TypeVar("T")
R = TypeVar("R")


class Jobs(NamedTuple):
    """A rank's rows of every batch, in the portions that a worker loads at a time: batches, or parts of them."""

    number: int  # how many jobs there are
    items: Callable[[int], Items]  # the rows of a job
    describe: Callable[[int], str]  # name of a job's batch for messages


def train_jobs(
    order: BatchOrder, rank: int, world_size: int, epoch: int, step: int, steps: int, parts: int = 1
) -> Jobs:
    """Select a rank's B / world_size rows of `steps` global batches, each in `parts` jobs as `part_rows` cuts it.

    `step` counts within the epoch and may be steps_per_epoch (the next epoch). Raises UserError if the batch is not
    divisible by the ranks.
    """
    if order.batch_size % world_size:
        raise UserError(f"data.batch_size={order.batch_size} is not divisible by {world_size} ranks; change one.")
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
    """Select rank r's samples [r c, (r + 1) c), c = ceil(n / world_size), of the n in use, in equally many batches.

    All ranks have ceil(c / batch_size) batches of `batch_size` rows; padding has index -1.
    """
    share = -(-manifest.n_used // world_size)
    end = min((rank + 1) * share, manifest.n_used)

    def items(number: int) -> Items:
        start = rank * share + number * batch_size
        indices = indices_at(manifest.starts, manifest.sizes, np.arange(start, min(start + batch_size, end))).tolist()
        return [(0, index) for index in indices] + [(0, PADDING)] * (batch_size - len(indices))

    return Jobs(-(-share // batch_size), items, lambda number: f"evaluation batch {number}")


class Loader(WorkerPool):
    """Loads batches of pairs, or the results of a function, with persistent worker processes.

    The processes are forked, so that they inherit the datasets `pairs` (by name), whose manifests may be large.
    """

    def __init__(self, options: LoaderOptions, pairs: Mapping[str, PairDataset] | None = None) -> None:
        super().__init__(self._do, options)
        self._pairs = pairs or {}

    def batches(self, source: str, jobs: Jobs) -> Generator[Batch, None, None]:
        """Yield a rank's batches, or parts of them, of a source of pairs; raise UserError as `run` does."""
        jobs_of_source = ((source, jobs.items(number)) for number in range(jobs.number))
        return self.run(jobs_of_source, jobs.describe, self._pairs[source].folder)

    def map(
        self, function: Callable[[T], R], groups: Iterable[list[T]], folder: Path
    ) -> Generator[list[R], None, None]:
        """Yield `function` of the items of each group, in order; raise UserError as `run` does.

        The function, its arguments and its results can be pickled. `folder` is the source of the items.
        """
        jobs = ((function, items) for items in groups)
        with closing(self.run(jobs, "part {} of an evaluation set".format, folder)) as parts:
            yield from map(pickle.loads, parts)

    def _do(self, job: tuple[Any, list[Any]]) -> Batch | bytes:
        what, items = job
        if isinstance(what, str):
            return self._pairs[what].batch(items)
        _Pickler(rows := io.BytesIO()).dump([what(item) for item in items])
        return rows.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles tensors by their bytes, because each tensor in shared memory takes a file descriptor."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


IN_PROCESS = Loader(LoaderOptions(workers=0))  # keeps nothing


def part_count(rows: int, image_size: int) -> int:
    """Return the number of parts for b rows of (3, image_size, image_size) uint8 pixels."""
    most = max(1, PART_BYTES // (3 * image_size**2))  # rows of a part
    return -(-rows // most)


def part_rows(rows: int, count: int, number: int) -> slice:
    """Return the rows of one of `count` parts of nearly equal size."""
    return slice(rows * number // count, rows * (number + 1) // count)


class RankBatch:
    """A batch of b rows in consecutive parts; `index` (b,) and `valid` (b,) as in `Batch`, `bad` of all parts."""

    def __init__(self, parts: Sequence[Batch]) -> None:
        self._parts: list[Batch | None] = list(parts)
        self._starts = [0, *itertools.accumulate(len(part.index) for part in parts)]
        index, valid = (torch.cat(column) for column in zip(*((part.index, part.valid) for part in parts), strict=True))
        is_pinned = parts[0].index.is_pinned()
        self.index, self.valid = (index.pin_memory(), valid.pin_memory()) if is_pinned else (index, valid)
        self.bad: tuple[BadSample, ...] = tuple(sample for part in parts for sample in part.bad)

    def __len__(self) -> int:
        return self._starts[-1]

    def pieces(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Return views of these rows' pixels, uint8 (r, 3, H, W), and tokens, int64 (r, T), one pair from each part."""
        found = []
        for part, start, stop in zip(self._parts, self._starts[:-1], self._starts[1:], strict=True):
            if start < rows.stop and rows.start < stop:
                if part is None:
                    raise RuntimeError(f"Rows {rows.start} to {rows.stop} of a batch have been released.")
                here = slice(max(rows.start - start, 0), min(rows.stop, stop) - start)
                found.append((part.image[here], part.tokens[here]))
        return found

    def release(self, rows: int) -> None:
        """Free the pixels and tokens of all parts that lie within the first `rows` rows."""
        for number, stop in enumerate(self._starts[1:]):
            if stop <= rows:
                self._parts[number] = None


def join_parts(parts: Iterator[Batch], count: int) -> Iterator[RankBatch]:
    """Join every `count` consecutive parts into a batch."""
    while found := list(itertools.islice(parts, count)):
        batch = RankBatch(found)
        del found  # the batch alone decides how long pixels are kept
        yield batch
