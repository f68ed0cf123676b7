"""Load this rank's batches with worker processes, in an order independent of the numbers of ranks and workers.

The main process sends (epoch, index) lists to the workers. The step is therefore the only state of a training loader,
and resuming at any step costs no more than starting at the first.
"""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.dataset import PADDING, Batch, PairDataset, Tokenize
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import BatchOrder
from neuclip_ds.data.rank_batch import part_rows
from neuclip_ds.data.transforms import ImageTransform
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between checks that the workers live while a batch is waited for
_LONGEST = 10  # time-outs for which a batch is waited for while shards arrive

Items = list[tuple[int, int]]  # (visit, index) of each row of a rank's batch; the visit is nearly always the epoch


class LoaderOptions(NamedTuple):
    """How batches are loaded, which does not change their contents."""

    workers: int = 2  # number of loader processes; 0 loads in this process
    prefetch: int = 4  # batches, or parts of them, that each worker prepares ahead
    timeout: float = 300  # seconds to wait for a batch
    restarts: int = 2  # how many times in a row dead or hanging workers are restarted at the same batch
    reader: Literal["tar", "webdataset"] = "tar"  # as `data.reader`
    captions: tuple[str, ...] = ("txt",)  # as `data.captions`
    cache: ShardCache | None = None  # of remote shards, or of all
    pin_memory: bool = False  # whether batches are in pinned memory


class Jobs(NamedTuple):
    """A rank's rows of every batch, in the portions that a worker loads at a time: whole batches, or parts of them."""

    number: int  # of jobs
    items: Callable[[int], Items]  # the rows of a job
    describe: Callable[[int], str]  # name of a job's batch for messages


def _train_jobs(order: BatchOrder, rank: int, world_size: int, epoch: int, step: int, steps: int, parts: int) -> Jobs:
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


def _eval_jobs(manifest: Manifest, rank: int, world_size: int, batch_size: int) -> Jobs:
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
    jobs = _train_jobs(order, rank, world_size, epoch, step, steps, parts)
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
    return _load(manifest, transform, tokenize, 0, _eval_jobs(manifest, rank, world_size, batch_size), options)


class _UserErrorsAsValues(Dataset[Batch | UserError]):
    """Return a UserError as a value: raised in a worker, it would arrive wrapped in the worker's traceback."""

    def __init__(self, dataset: PairDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, items: Items) -> Batch | UserError:
        try:
            return self._dataset.__getitems__(items)
        except UserError as error:
            return error


class _WorkerFailure(Exception):
    """A worker died or does not respond; the message has the cause and a fix."""


def _load(
    manifest: Manifest,
    transform: ImageTransform,
    tokenize: Tokenize,
    seed: int,
    jobs: Jobs,
    options: LoaderOptions,
) -> Iterator[Batch]:
    """Iterate over the batches of all jobs; after a failure, restart the workers at the job that was due."""
    dataset = PairDataset(
        manifest, transform, tokenize, seed=seed, captions=options.captions, reader=options.reader, cache=options.cache
    )
    number = failures = 0
    while number < jobs.number:
        try:
            iterator = _start(dataset, map(jobs.items, range(number, jobs.number)), options)
            with _stopping_workers(iterator):
                while number < jobs.number:
                    waited_for = f"{jobs.describe(number)} from {options.workers} loader processes"
                    yield _next(iterator, f"{waited_for} (shards in {dataset.folder})", options)
                    number, failures = number + 1, 0
        except _WorkerFailure as error:
            failures += 1
            if failures > options.restarts:
                raise UserError(f"{error} ({failures} times in a row).") from error
            log.warning("%s; restarting the loader processes (%d of %d)", error, failures, options.restarts)


def _start(dataset: PairDataset, batches: Iterator[Items], options: LoaderOptions) -> Iterator[Batch | UserError]:
    loader = DataLoader(
        _UserErrorsAsValues(dataset),
        batch_sampler=batches,
        collate_fn=_collate,
        num_workers=options.workers,  # each with one torch thread, torch's default
        prefetch_factor=options.prefetch if options.workers else None,
        timeout=_POLL if options.workers else 0,
        worker_init_fn=partial(_start_worker, os.getpid()),
        pin_memory=options.pin_memory,
    )
    try:
        iterator = iter(loader)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise _WorkerFailure(f"A loader process died while it started: {str(error).rstrip(' .')}") from error
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        # torch's SIGCHLD handler raises wherever the main thread is when a process that it knows has died
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    return iterator


def _next(iterator: Iterator[Batch | UserError], waited_for: str, options: LoaderOptions) -> Batch:
    """Return the next batch; raise `_WorkerFailure` if a worker has died, or nothing has come for too long."""
    workers = _workers(iterator)
    with _killing_after(options, workers) as expired:
        while True:
            try:
                result = next(iterator)
                break
            except Exception as error:  # of torch, or of a connection to a process that has died
                is_poll = str(error).startswith("DataLoader timed out")  # its state is unchanged
                if workers and wait([worker.sentinel for worker in workers], 0 if is_poll else _POLL):
                    raise _failure(workers, waited_for, options.timeout, expired.is_set()) from error
                if not is_poll:
                    raise
                if _waits_for_storage(options):
                    with deferring(False):  # a signal ends the run now: no step may come for an hour
                        pass
    if isinstance(result, UserError):
        raise result
    return result


def _failure(workers: Sequence[BaseProcess], waited_for: str, timeout: float, expired: bool) -> _WorkerFailure:
    if expired:
        return _WorkerFailure(
            f"Timed out after {timeout:g} s waiting for {waited_for}: "
            "check that the storage responds, or raise data.timeout"
        )
    ended = wait([worker.sentinel for worker in workers])
    dead = next(worker for worker in workers if worker.sentinel in ended)
    dead.join()  # sets its exit code
    code = dead.exitcode or 0
    end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return _WorkerFailure(
        f"A loader process died while waiting for {waited_for}: {end}; "
        "if memory ran out, lower data.workers or data.prefetch"
    )


def _collate(batch: Any) -> Any:
    """Return the batch as it is: the dataset has already collated it."""
    return batch


def _start_worker(parent: int, worker: int) -> None:
    end_with_parent(parent)


def _workers(iterator: Iterator[Batch | UserError]) -> Sequence[BaseProcess]:
    return iterator._workers if isinstance(iterator, _MultiProcessingDataLoaderIter) else ()


def _waits_for_storage(options: LoaderOptions) -> bool:
    return options.cache is not None and options.cache.waits_for_storage()


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


@contextmanager
def _killing_after(options: LoaderOptions, workers: Sequence[BaseProcess]) -> Iterator[threading.Event]:
    """Kill the workers, and set the event, if the block takes `options.timeout` seconds in which no shard arrives.

    While shards arrive it may take ten times as long, besides the time that the node waits for its storage. This also
    ends a read from a worker that has stopped in the middle of handing over a batch, for which torch has no time limit.
    """
    ended, expired = threading.Event(), threading.Event()

    def watch() -> None:
        arrived = options.cache.arrived if options.cache is not None else lambda: 0
        begin = min(_POLL, options.timeout / 2)
        if ended.wait(begin):  # nearly always: a look at all shards of the cache is not for every batch
            return
        before, turns, seconds = arrived(), 0, options.timeout - begin
        while turns < _LONGEST:
            if ended.wait(seconds):
                return
            seconds = options.timeout
            if _waits_for_storage(options):  # which the workers end after `data.max_outage`
                continue
            if (now := arrived()) == before:
                break
            before, turns = now, turns + 1
        expired.set()
        _kill(workers)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield expired
    finally:
        ended.set()


@contextmanager
def _stopping_workers(iterator: Iterator[Batch | UserError]) -> Iterator[None]:
    """Kill the iterator's workers when the block ends, at the latest when the interpreter exits.

    They have nothing to save. torch's own end would wait for locks that a killed worker may hold.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        yield
        return

    def stop() -> None:
        iterator._shutdown = True  # for torch
        _kill(iterator._workers)
        for worker in iterator._workers:
            worker.join()  # else it stays a zombie
        for queue in iterator._index_queues:
            queue.close()
        if iterator._pin_memory:
            iterator._pin_memory_thread_done_event.set()

    atexit.register(stop)
    try:
        yield
    finally:
        atexit.unregister(stop)
        stop()
