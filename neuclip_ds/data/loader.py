"""Loaders: batches of this rank, made by worker processes, in an order that neither ranks nor workers change.

The main process sends (epoch, index) lists to the workers. The only state of a training loader is therefore the
step, and a start at any step costs no more than a start at the first one.
"""

from __future__ import annotations

import atexit
import signal
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.dataset import PADDING, BadSample, Batch, PairDataset, Tokenize, iter_captions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.transforms import ImageTransform
from neuclip_ds.errors import UserError

__all__ = [
    "PADDING",
    "BadSample",
    "BadSampleLog",
    "Batch",
    "PairDataset",
    "Tokenize",
    "eval_loader",
    "iter_captions",
    "train_loader",
]

Items = list[tuple[int, int]]  # (epoch, index) of each row of a rank's batch


class _Shares(Sampler[Items]):
    """A rank's share of every batch."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    @abstractmethod
    def describe(self, number: int) -> str:
        """Name of the batch `number` for messages."""


class TrainSampler(_Shares):
    """A rank's share of the global batches number `first` ... `total_steps` - 1, across epochs."""

    def __init__(self, order: GlobalOrder, rank: int, world_size: int, first: int, total_steps: int) -> None:
        if order.batch_size % world_size:
            raise UserError(
                f"data.batch_size={order.batch_size} does not divide by {world_size} ranks; choose a multiple of them."
            )
        self._order, self._steps = order, range(first, total_steps)
        share = order.batch_size // world_size
        self._rows = slice(rank * share, (rank + 1) * share)

    def __len__(self) -> int:
        return len(self._steps)

    def describe(self, number: int) -> str:
        epoch, step = divmod(self._steps[number], self._order.steps_per_epoch)
        return f"step {step} of epoch {epoch}"

    def __iter__(self) -> Iterator[Items]:
        for number in self._steps:
            epoch, step = divmod(number, self._order.steps_per_epoch)
            yield [(epoch, index) for index in self._order.batch(epoch, step)[self._rows].tolist()]


class EvalSampler(_Shares):
    """Rank r's contiguous rows [r c, (r + 1) c), c = ceil(n / world_size), padded to equally many full batches."""

    def __init__(self, n: int, rank: int, world_size: int, batch_size: int) -> None:
        share = -(-n // world_size)
        self._first, self._end = rank * share, min((rank + 1) * share, n)
        self._batch_size, self._batches = batch_size, -(-share // batch_size)

    def __len__(self) -> int:
        return self._batches

    def describe(self, number: int) -> str:
        return f"evaluation batch {number}"

    def __iter__(self) -> Iterator[Items]:
        for number in range(self._batches):
            start = self._first + number * self._batch_size
            yield [(0, i if i < self._end else PADDING) for i in range(start, start + self._batch_size)]


def train_loader(
    manifest: Manifest,
    order: GlobalOrder,
    transform: ImageTransform,
    tokenize: Tokenize,
    *,
    rank: int = 0,
    world_size: int = 1,
    epoch: int = 0,
    step: int = 0,
    total_steps: int,
    workers: int = 2,
    prefetch: int = 4,
    timeout: float = 300,
    reader: Literal["tar", "webdataset"] = "tar",
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """This rank's batches of (B / world_size) rows, from `step` of `epoch` on, without a break between epochs.

    Args:
        epoch, step: where to start; `step` counts within the epoch and may be steps_per_epoch (the next epoch).
        total_steps: steps since step 0 of epoch 0 after which the loader ends, whatever the start.
        workers: processes that load; 0 loads in this one.
        prefetch: batches that each worker prepares ahead.
        timeout: seconds to wait for a batch.

    Raises:
        UserError: the batch does not divide by the ranks, a shard has changed, no batch within `timeout`, or a
            worker died.
    """
    first = epoch * order.steps_per_epoch + step
    sampler = TrainSampler(order, rank, world_size, first, total_steps)
    dataset = PairDataset(manifest, transform, tokenize, seed=order.seed, reader=reader)
    return _batches(dataset, sampler, workers, prefetch, timeout, pin_memory)


def eval_loader(
    manifest: Manifest,
    transform: ImageTransform,
    tokenize: Tokenize,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int,
    workers: int = 2,
    prefetch: int = 2,
    timeout: float = 300,
    reader: Literal["tar", "webdataset"] = "tar",
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Every sample once over all ranks, in order: rank r yields the r-th contiguous part.

    All ranks yield ceil(ceil(n / world_size) / batch_size) batches of `batch_size` rows; padding has index -1.
    """
    sampler = EvalSampler(manifest.n, rank, world_size, batch_size)
    dataset = PairDataset(manifest, transform, tokenize, reader=reader)
    return _batches(dataset, sampler, workers, prefetch, timeout, pin_memory)


class _CarryUserErrors(Dataset[Batch | UserError]):
    """Hands a UserError over as a value: raised in a worker it would arrive wrapped in that worker's traceback."""

    def __init__(self, dataset: PairDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, items: Items) -> Batch | UserError:
        try:
            return self._dataset.__getitems__(items)
        except UserError as error:
            return error


def _batches(
    dataset: PairDataset, sampler: _Shares, workers: int, prefetch: int, timeout: float, pin_memory: bool
) -> Iterator[Batch]:
    loader = DataLoader(
        _CarryUserErrors(dataset),
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=workers,  # each with one torch thread, by torch's own rule
        prefetch_factor=prefetch if workers else None,
        timeout=timeout if workers else 0,
        worker_init_fn=_leave_signals_to_the_main_process,
        pin_memory=pin_memory,
    )
    iterator = iter(loader)
    with _stopping_workers(iterator):
        for number in range(len(sampler)):
            waited_for = f"{sampler.describe(number)} from {workers} loader processes (shards in {dataset.folder})"
            yield _next(iterator, waited_for, timeout)


def _next(iterator: Iterator[Batch | UserError], waited_for: str, timeout: float) -> Batch:
    try:
        result = next(iterator)
    except RuntimeError as error:
        if str(error).startswith("DataLoader timed out"):
            raise UserError(
                f"Waited {timeout:g} s in vain for {waited_for}; check that the storage answers, or raise data.timeout."
            ) from error
        if str(error).startswith("DataLoader worker (pid"):
            raise UserError(
                f"A loader process died while {waited_for} was awaited: {str(error).rstrip(' .')}; "
                "if memory ran out, lower data.workers or data.prefetch."
            ) from error
        raise
    if isinstance(result, UserError):
        raise result
    return result


def _as_it_is(batch: Any) -> Any:
    """Collation: the dataset has already made a batch."""
    return batch


def _leave_signals_to_the_main_process(worker: int) -> None:
    """Launchers send SIGTERM, and schedulers SIGUSR1, to the whole tree: the main process is to save with its
    workers alive, and then ends them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _stopping_workers(iterator: Iterator[Batch | UserError]) -> Iterator[None]:
    """End the iterator's workers with the block, and at the latest with the interpreter.

    torch ends them with SIGTERM, which they ignore, so one that is stuck would otherwise hold up the exit for ever.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        yield
        return

    def stop() -> None:
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()  # or it stays as a zombie

    atexit.register(stop)
    try:
        yield
    finally:
        atexit.unregister(stop)
        stop()
