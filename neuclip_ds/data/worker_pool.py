"""Worker processes that return results in job order, are replaced if they die or hang, and exit with the parent."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import multiprocessing

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.decoders import CaptionSources
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # consecutive failures of the worker whose result is due
PROCESS_NAME = "loader"  # a worker's name in ps and top

_CONTEXT = multiprocessing.get_context("fork")  # workers share the manifest's memory, and need not import modules
_POLL = 1.0  # seconds between checks while the main process waits for a worker


class LoaderOptions(NamedTuple):
    """Options of the loader. Only `captions` changes the contents of batches."""

    workers: int = 2  # number of loader processes; 0 loads in this process
    prefetch: int = 4  # batches, or parts of batches, that each worker prepares ahead
    timeout: float = 300  # seconds to wait for a batch
    captions: CaptionSources = ("txt",)  # as in `data.captions`
    cache: ShardCache | None = None  # for copies of remote shards
    pin_memory: bool = False  # whether batches are in pinned memory


class WorkerPool:
    """A pool of loader processes, which are forked for the first series of jobs and kept for later series.

    `work` runs a job in a worker or, if there are no workers, in this process; it may raise `UserError`. With the
    `pin_memory` option, results that have a `pin_memory` method arrive in pinned memory.
    """

    def __init__(self, work: Callable[[Any], Any], options: LoaderOptions) -> None:
        self._work, self._options = work, options
        self._workers: list[_Worker] = []

    def run(self, jobs: Iterable[Any], describe: Callable[[int], str], folder: Path) -> Generator[Any, None, None]:
        """Yield the results of jobs in order; a worker that fails is replaced, and its unfinished jobs are repeated.

        Jobs must be picklable; at most `prefetch` jobs per worker are read ahead. Error messages contain `folder` (the
        folder of the shards) and `describe(n)` (a name for the result of job n). If the caller stops early, the next
        call starts new workers. Raises UserError if a job raises it or if a worker fails repeatedly.
        """
        count = self._options.workers
        if not count:
            yield from map(self._work, jobs)
            return
        if any(worker.due for worker in self._workers):  # from a series that the caller no longer reads
            self.close()
        if not self._workers:
            atexit.register(self.close)
            self._workers = [_Worker(self._work, self._options) for _ in range(count)]
        workers, numbered = self._workers, enumerate(jobs)
        try:
            for number, job in itertools.islice(numbered, count * self._options.prefetch):
                workers[number % count].give(job)
            for number in itertools.count():
                if not workers[number % count].due:
                    return
                where = f"from {count} loader processes (shards in {folder})"
                result = self._take(workers, number % count, f"{describe(number)} {where}")
                for following, job in itertools.islice(numbered, 1):
                    workers[following % count].give(job)
                yield result
        except BaseException:  # also if the caller closes this generator
            _stop(workers)
            raise

    def close(self) -> None:
        """Stop the workers, if there are any. They have no state to save."""
        atexit.unregister(self.close)
        _stop(self._workers)
        self._workers = []

    def _take(self, workers: list[_Worker], place: int, waited_for: str) -> Any:
        """Return the next result of worker number `place`; replace the worker if it fails."""
        failures = 0
        while True:
            try:
                return workers[place].take(waited_for)
            except _WorkerFailure as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise UserError(f"{error} ({failures} times in a row).") from error
                log.warning("%s; replacing it (%d of %d)", error, failures, MAX_FAILURES - 1)
            workers[place].stop()
            jobs, workers[place] = workers[place].due, _Worker(self._work, self._options)
            for job in jobs:
                workers[place].give(job)


def _stop(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


class _WorkerFailure(Exception):
    """Raised if a worker dies or does not respond; the message names the cause and a fix."""


class _Worker:
    """A worker process and a thread that receives results; `due` contains the jobs whose results are not yet taken."""

    def __init__(self, work: Callable[[Any], Any], options: LoaderOptions) -> None:
        self.due: deque[Any] = deque()
        self._options = options
        get_temp_dir()  # creates the folder for sockets that pass tensors; a killed worker would not remove it
        self._jobs = _CONTEXT.Queue()
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        arguments = os.getpid(), work, self._jobs, sender
        self._process = _CONTEXT.Process(target=_do_jobs, args=arguments, daemon=True)
        self._process.start()
        sender.close()  # only the worker's end stays open, and closes when the worker ends
        self._results: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        device = torch.cuda.current_device() if options.pin_memory else None
        threading.Thread(target=_receive, args=(receiver, self._results, device), daemon=True).start()

    def give(self, job: Any) -> None:
        """Send a job to the worker."""
        self.due.append(job)
        self._jobs.put(job)

    def take(self, waited_for: str) -> Any:
        """Return the next result.

        Raises:
            _WorkerFailure: the worker has died, or neither a result nor shard data has arrived for
                `options.timeout` seconds, excluding time that the node spends waiting for storage.
        """
        cache, timeout = self._options.cache, self._options.timeout
        since, arrived = time.monotonic(), -1
        while True:
            with suppress(Empty):
                result, end = self._results.get(timeout=min(_POLL, timeout / 2))
                break
            if cache is not None and cache.waits_for_storage():  # this ends after `data.max_outage`
                since = time.monotonic()
                with deferring(False):  # a signal ends the run now: the next step may be an hour away
                    pass
            over, before = time.monotonic() - since >= timeout, arrived
            if over or arrived < 0:
                arrived = cache.arrived() if cache is not None else 0
            if over and arrived == before:
                raise _WorkerFailure(
                    f"Timed out after {timeout:g} s waiting for {waited_for}: check the storage or raise data.timeout"
                )
            since = time.monotonic() if over else since
        if end is not None:
            self._process.join(_POLL)  # sets its exit code
            code = self._process.exitcode
            if code is None:
                raise end
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise _WorkerFailure(
                f"A loader process died while waiting for {waited_for}: {cause}; lower data.workers if memory ran out"
            )
        self.due.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self._process.join()  # otherwise, it would stay a zombie
        self._jobs.cancel_join_thread()
        self._jobs.close()


def _receive(results: Connection, received: SimpleQueue[tuple[Any, Exception | None]], device: int | None) -> None:
    """Forward a worker's results (pinned if `device` is given) and, at the end, the error that ended the connection."""
    try:
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own current device
        while True:
            result = results.recv()
            pins = device is not None and hasattr(result, "pin_memory")
            received.put((result.pin_memory() if pins else result, None))
    except Exception as error:  # EOFError if the worker has ended, or any other error of a broken connection
        received.put((None, error))
    results.close()


def _do_jobs(parent: int, work: Callable[[Any], Any], jobs: Any, results: Connection) -> None:
    """Run jobs until this process is killed; if a job raises an error, send the error as the job's result."""
    end_with_parent(parent)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    torch.set_num_threads(1)
    while True:
        try:
            result = work(jobs.get())
        except UserError as error:
            result = error
        except Exception:
            result = RuntimeError(f"A loader process failed:\n{traceback.format_exc()}")
        results.send(result)
