"""Worker processes that do jobs in order: restarted where they die or hang, stopped with the process that has them."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.captions import CaptionSources
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between checks that the workers live while a batch is waited for
_LONGEST = 10  # time-outs for which a batch is waited for while shards arrive


class LoaderOptions(NamedTuple):
    """How batches are loaded, which does not change their contents."""

    workers: int = 2  # number of loader processes; 0 loads in this process
    prefetch: int = 4  # batches, or parts of them, that each worker prepares ahead
    timeout: float = 300  # seconds to wait for a batch
    restarts: int = 2  # how many times in a row dead or hanging workers are restarted at the same batch
    reader: Literal["tar", "webdataset"] = "tar"  # as `data.reader`
    captions: CaptionSources = ("txt",)  # as `data.captions`
    cache: ShardCache | None = None  # of remote shards, or of all
    pin_memory: bool = False  # whether batches are in pinned memory


class WorkerPool:
    """Loader processes that do jobs, and survive from one series of jobs to the next.

    They are forked when the first series begins, so they share the memory of this process and import nothing again.

    Args:
        work: does a job, in a worker; in this process without workers. May raise `UserError`.
    """

    def __init__(self, work: Callable[[Any], Any], options: LoaderOptions) -> None:
        self._work, self._options = work, options
        self._series: _Series | None = None  # which the workers are at
        self._iterator: _MultiProcessingDataLoaderIter | None = None
        self._running = ExitStack()

    def run(self, jobs: Iterable[Any], describe: Callable[[int], str]) -> Generator[Any, None, None]:
        """Yield the results of jobs in order; after a failure, restart the workers at the job that was due.

        A series that is not read to its end stops the workers. The next one starts others.

        Args:
            jobs: what can be pickled; read as far ahead as the workers may prepare.
            describe: from a job's number to what is waited for, for messages.

        Raises:
            UserError: of a job, or workers repeatedly die or exceed `options.timeout`.
        """
        if not self._options.workers:
            yield from map(self._work, jobs)
            return
        series = _Series(jobs)
        try:
            yield from self._results(series, describe)
        except BaseException:  # also where the caller closes this generator
            if self._series in (None, series):
                self.close()
            raise

    def close(self) -> None:
        """Stop the workers, if there are any."""
        self._series = self._iterator = None
        self._running.close()

    def _results(self, series: _Series, describe: Callable[[int], str]) -> Iterator[Any]:
        number = failures = 0
        while True:
            try:
                iterator = self._begin(series)
                while series.due:
                    result = _next(iterator, describe(number), self._options)
                    series.due.popleft()
                    yield result
                    number, failures = number + 1, 0
                return
            except _WorkerFailure as error:
                self.close()
                failures += 1
                if failures > self._options.restarts:
                    raise UserError(f"{error} ({failures} times in a row).") from error
                log.warning("%s; restarting the loader processes (%d of %d)", error, failures, self._options.restarts)

    def _begin(self, series: _Series) -> _MultiProcessingDataLoaderIter:
        """Give the workers the first jobs that are due, as many as they may prepare ahead."""
        if self._series is not None and self._series.due:  # of a series that nobody reads any more
            self.close()
        self._series = series
        if self._iterator is None:
            series.repeat()
            self._iterator = _start(self._work, series, self._options)
            self._running.enter_context(_stopping_workers(self._iterator))
        else:
            self._iterator._sampler_iter = series
            for _ in range(self._options.workers * self._options.prefetch):
                self._iterator._try_put_index()
        return self._iterator


class _Series(Iterator[Any]):
    """Jobs as torch's loader reads them; `due` holds those that it has read and whose results are not here yet."""

    def __init__(self, jobs: Iterable[Any]) -> None:
        self.due: deque[Any] = deque()
        self._again, self._new = deque[Any](), iter(jobs)

    def __next__(self) -> Any:
        job = self._again.popleft() if self._again else next(self._new)
        self.due.append(job)
        return job

    def repeat(self) -> None:
        """Give what is due again."""
        self._again.extendleft(reversed(self.due))
        self.due.clear()


class _UserErrorsAsValues(Dataset[Any]):
    """Return a UserError as a value: raised in a worker, it would arrive wrapped in the worker's traceback."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __getitems__(self, job: Any) -> Any:
        try:
            return self._work(job)
        except UserError as error:
            return error


class _WorkerFailure(Exception):
    """A worker died or does not respond; the message has the cause and a fix."""


def _start(work: Callable[[Any], Any], jobs: Iterator[Any], options: LoaderOptions) -> _MultiProcessingDataLoaderIter:
    loader: DataLoader[Any] = DataLoader(
        _UserErrorsAsValues(work),
        batch_sampler=jobs,  # whatever they are: the loader only hands them on
        collate_fn=_collate,
        num_workers=options.workers,  # each with one torch thread, torch's default
        prefetch_factor=options.prefetch,
        timeout=_POLL,
        worker_init_fn=partial(_start_worker, os.getpid()),
        pin_memory=options.pin_memory,
    )
    try:
        iterator = iter(loader)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise _WorkerFailure(f"A loader process died while it started: {str(error).rstrip(' .')}") from error
    assert isinstance(iterator, _MultiProcessingDataLoaderIter)
    # torch's SIGCHLD handler raises wherever the main thread is when a process that it knows has died
    _remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    return iterator


def _next(iterator: _MultiProcessingDataLoaderIter, waited_for: str, options: LoaderOptions) -> Any:
    """Return the next result; raise `_WorkerFailure` if a worker has died, or nothing has come for too long."""
    workers = iterator._workers
    with _killing_after(options, workers) as expired:
        while True:
            try:
                result = next(iterator)
                break
            except Exception as error:  # of torch, or of a connection to a process that has died
                is_poll = str(error).startswith("DataLoader timed out")  # its state is unchanged
                if wait([worker.sentinel for worker in workers], 0 if is_poll else _POLL):
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


def _collate(result: Any) -> Any:
    """Return the result of a job as it is."""
    return result


def _start_worker(parent: int, worker: int) -> None:
    end_with_parent(parent)


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
def _stopping_workers(iterator: _MultiProcessingDataLoaderIter) -> Iterator[None]:
    """Kill the iterator's workers when the block ends, at the latest when the interpreter exits.

    They have nothing to save. torch's own end would wait for locks that a killed worker may hold.
    """

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
