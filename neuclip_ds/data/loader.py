"""Loaders: batches of this rank, made by worker processes, in an order that neither ranks nor workers change.

The main process sends (epoch, index) lists to the workers. The only state of a training loader is therefore the
step, and a start at any step costs no more than a start at the first one.
"""

from __future__ import annotations

import atexit
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from neuclip_ds.data.bad_samples import BadSampleLog
from neuclip_ds.data.cache import ShardCache
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
    "LoaderOptions",
    "PairDataset",
    "Tokenize",
    "eval_loader",
    "iter_captions",
    "train_loader",
]

log = logging.getLogger(__name__)

Items = list[tuple[int, int]]  # (epoch, index) of each row of a rank's batch


class LoaderOptions(NamedTuple):
    """How batches are made; which ones they are does not depend on it.

    Attributes:
        workers: processes that load; 0 loads in this one.
        prefetch: batches that each worker prepares ahead.
        timeout: seconds to wait for a batch.
        restarts: how often in a row workers that died or hang are replaced at the same batch.
        reader: as `data.reader`.
        captions: as `data.captions`.
        cache: of remote shards.
        pin_memory: whether batches are handed out in pinned memory.
    """

    workers: int = 2
    prefetch: int = 4
    timeout: float = 300
    restarts: int = 2
    reader: Literal["tar", "webdataset"] = "tar"
    captions: tuple[str, ...] = ("txt",)
    cache: ShardCache | None = None
    pin_memory: bool = False


class RankSampler(ABC):
    """A rank's share of every batch."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    @abstractmethod
    def items(self, number: int) -> Items:
        """The share of batch `number`."""

    @abstractmethod
    def describe(self, number: int) -> str:
        """Name of the batch `number` for messages."""


class TrainSampler(RankSampler):
    """A rank's share of `steps` global batches from (epoch, step) on, across epochs."""

    def __init__(self, order: GlobalOrder, rank: int, world_size: int, epoch: int, step: int, steps: int) -> None:
        if order.batch_size % world_size:
            raise UserError(
                f"data.batch_size={order.batch_size} does not divide by {world_size} ranks; choose a multiple of them."
            )
        self._order, self._first, self._steps = order, epoch * order.steps_per_epoch + step, steps
        share = order.batch_size // world_size
        self._rows = slice(rank * share, (rank + 1) * share)

    def __len__(self) -> int:
        return self._steps

    def describe(self, number: int) -> str:
        epoch, step = self._place(number)
        return f"step {step} of epoch {epoch}"

    def items(self, number: int) -> Items:
        epoch, step = self._place(number)
        return [(epoch, index) for index in self._order.batch(epoch, step)[self._rows].tolist()]

    def _place(self, number: int) -> tuple[int, int]:
        return divmod(self._first + number, self._order.steps_per_epoch)


class EvalSampler(RankSampler):
    """Rank r's contiguous part [r c, (r + 1) c), c = ceil(n / world_size), of the n samples that are in use, padded to
    equally many full batches."""

    def __init__(self, manifest: Manifest, rank: int, world_size: int, batch_size: int) -> None:
        share = -(-manifest.n_used // world_size)
        self._manifest = manifest
        self._first, self._end = rank * share, min((rank + 1) * share, manifest.n_used)
        self._batch_size, self._batches = batch_size, -(-share // batch_size)

    def __len__(self) -> int:
        return self._batches

    def describe(self, number: int) -> str:
        return f"evaluation batch {number}"

    def items(self, number: int) -> Items:
        start = self._first + number * self._batch_size
        used = range(start, min(start + self._batch_size, self._end))
        indices = self._manifest.used(np.arange(start, start + len(used))).tolist()
        return [(0, index) for index in indices] + [(0, PADDING)] * (self._batch_size - len(indices))


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
    steps: int,
    options: LoaderOptions = LoaderOptions(),
) -> Iterator[Batch]:
    """This rank's batches of (B / world_size) rows, from `step` of `epoch` on, without a break between epochs.

    Args:
        epoch, step: where to start; `step` counts within the epoch and may be steps_per_epoch (the next epoch).
        steps: how many batches there are to be.

    Raises:
        UserError: the batch does not divide by the ranks, a shard has changed, or again and again no batch comes
            within `options.timeout` or a worker dies.
    """
    shares = TrainSampler(order, rank, world_size, epoch, step, steps)
    return _batches(_dataset(manifest, transform, tokenize, order.seed, options), shares, options)


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
    """Every sample once over all ranks, in order: rank r yields the r-th contiguous part.

    All ranks yield ceil(ceil(n / world_size) / batch_size) batches of `batch_size` rows; padding has index -1.
    """
    shares = EvalSampler(manifest, rank, world_size, batch_size)
    return _batches(_dataset(manifest, transform, tokenize, 0, options), shares, options)


def _dataset(
    manifest: Manifest, transform: ImageTransform, tokenize: Tokenize, seed: int, options: LoaderOptions
) -> PairDataset:
    return PairDataset(
        manifest,
        transform,
        tokenize,
        seed=seed,
        captions=options.captions,
        reader=options.reader,
        cache=options.cache,
    )


class _CarryUserErrors(Dataset[Batch | UserError]):
    """Hands a UserError over as a value: raised in a worker it would arrive wrapped in that worker's traceback."""

    def __init__(self, dataset: PairDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, items: Items) -> Batch | UserError:
        try:
            return self._dataset.__getitems__(items)
        except UserError as error:
            return error


class _From(Sampler[Items]):
    """The shares from batch `first` on."""

    def __init__(self, shares: RankSampler, first: int) -> None:
        self._shares, self._first = shares, first

    def __iter__(self) -> Iterator[Items]:
        return map(self._shares.items, range(self._first, len(self._shares)))


class _Mishap(Exception):
    """A worker died or does not answer; the message says which and what helps."""


def _batches(dataset: PairDataset, shares: RankSampler, options: LoaderOptions) -> Iterator[Batch]:
    """All batches; at a mishap the workers are started again at the batch that was due."""
    number = mishaps = 0
    while number < len(shares):
        iterator = _start(dataset, shares, number, options)
        with _stopping_workers(iterator):
            try:
                while number < len(shares):
                    waited_for = f"{shares.describe(number)} from {options.workers} loader processes"
                    yield _next(iterator, f"{waited_for} (shards in {dataset.folder})", options.timeout)
                    number, mishaps = number + 1, 0
            except _Mishap as error:
                mishaps += 1
                if mishaps > options.restarts:
                    raise UserError(f"{error} ({mishaps} times in a row).") from error
                log.warning("%s; the loader processes are replaced (%d of %d)", error, mishaps, options.restarts)


def _start(
    dataset: PairDataset, shares: RankSampler, first: int, options: LoaderOptions
) -> Iterator[Batch | UserError]:
    workers = options.workers
    return iter(
        DataLoader(
            _CarryUserErrors(dataset),
            batch_sampler=_From(shares, first),
            collate_fn=_as_it_is,
            num_workers=workers,  # each with one torch thread, by torch's own rule
            prefetch_factor=options.prefetch if workers else None,
            timeout=options.timeout if workers else 0,
            worker_init_fn=_leave_signals_to_the_main_process,
            pin_memory=options.pin_memory,
        )
    )


def _next(iterator: Iterator[Batch | UserError], waited_for: str, timeout: float) -> Batch:
    try:
        result = next(iterator)
    except RuntimeError as error:
        if str(error).startswith("DataLoader timed out"):
            raise _Mishap(
                f"Waited {timeout:g} s in vain for {waited_for}: check that the storage answers, or raise data.timeout"
            ) from error
        if str(error).startswith("DataLoader worker (pid"):
            raise _Mishap(
                f"A loader process died while {waited_for} was awaited: {str(error).rstrip(' .')}; "
                "if memory ran out, lower data.workers or data.prefetch"
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
