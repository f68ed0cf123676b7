"""Worker processes that return results in job order, are replaced if they die or hang, and exit with the parent."""

from __future__ import annotations

import atexit
import errno
import gc
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import multiprocessing

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.decoders import CaptionSources
from neuclip_ds.distributed.stop_signals import raise_received_signal
from neuclip_ds.errors import UserError, cause_of, counted, explained
from neuclip_ds.limits import fix_of_limit, fix_of_shared_memory, low_limit

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # consecutive failures of the worker whose result is due
PROCESS_NAME = "loader"  # a worker's name in ps and top

_CONTEXT = multiprocessing.get_context("fork")  # workers share the manifest's memory, and need not import modules
_POLL = 1.0  # seconds between checks while the main process waits for a worker


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of the loader. Only `captions` changes the contents of batches."""

    workers: int = 2  # number of loader processes; 0 loads in this process
    prefetch: int = 4  # batches, or parts of batches, that each worker prepares ahead
    timeout: float = 300  # seconds without a batch and without new data of remote shards until a worker is replaced
    captions: CaptionSources = ("txt",)  # as in `data.captions`
    cache: ShardCache | None = None  # for copies of remote shards
    pin_memory: bool = False  # whether batches from worker processes are in pinned memory


class WorkerPool:
    """A pool of loader processes, which are forked for the first series of jobs and kept for later series.

    `work` runs a job in a worker or, if there are no workers, in this process; it may raise `UserError`. With the
    `pin_memory` option, the workers' results that have a `pin_memory` method arrive in pinned memory.
    """

    def __init__(self, work: Callable[[Any], Any], options: LoaderOptions) -> None:
        self._work = work
        self._options = options
        self._workers: list[_Worker] = []

    def run(
        self, jobs: Iterable[Any], describe: Callable[[int], str], folder: str | Path = ""
    ) -> Generator[Any, None, None]:
        """Yield the results of jobs in order; a worker that fails is replaced, and its unfinished jobs are repeated.

        Jobs must be picklable; at most `prefetch` jobs per worker are read ahead. Errors about a worker that dies or
        hangs name `describe(n)` (a name for the result of the n-th job, from 1) and, if given, the `folder` of the
        data. If the caller stops early, the next call starts new workers.

        Raises UserError if a job raises it, if a worker fails three times in a row, or if workers cannot be started or
        send results, for example because a limit of this machine is too low. Any other exception in a worker is raised
        as a RuntimeError that contains the traceback.
        """
        count = self._options.workers
        if not count:
            yield from map(self._work, jobs)
            return
        if any(worker.unfinished for worker in self._workers):  # from a series that the caller no longer reads
            self.close()
        if not self._workers:
            if problem := low_limit():
                raise UserError(problem)
            atexit.register(self.close)
        workers = self._workers
        numbered_jobs = enumerate(jobs)  # worker j does the jobs j, j + count, j + 2 count ...
        try:
            while len(workers) < count:
                workers.append(_start_worker(self._work, self._options))
            for number, job in itertools.islice(numbered_jobs, count * self._options.prefetch):
                workers[number % count].submit(job)
            for number in itertools.count():
                if not workers[number % count].unfinished:
                    return
                loaders = counted(count, "loader process", "loader processes")
                waited_for = f"{describe(number + 1)} from {loaders}{f' (data in {folder})' if folder else ''}"
                result = self._next_result(workers, number % count, waited_for)
                next_job = next(numbered_jobs, None)
                if next_job is not None:
                    next_number, job = next_job
                    workers[next_number % count].submit(job)
                yield result
        except BaseException:  # also if the caller closes this generator
            _stop(workers)
            raise

    def close(self) -> None:
        """Stop the workers, if there are any. They have no state to save."""
        atexit.unregister(self.close)
        _stop(self._workers)
        self._workers = []

    def _next_result(self, workers: list[_Worker], number: int, waited_for: str) -> Any:
        """Return the next result of worker `number`; replace the worker if it fails."""
        failures = 0
        while True:
            try:
                return workers[number].next_result(waited_for)
            except _WorkerFailure as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise UserError(f"{error}. This has happened {failures} times in a row.") from error
                log.warning("replacing a loader process (attempt %d of %d). %s", failures, MAX_FAILURES - 1, error)
            failed = workers[number]
            failed.stop()
            workers[number] = _start_worker(self._work, self._options)
            for job in failed.unfinished:
                workers[number].submit(job)


def _start_worker(work: Callable[[Any], Any], options: LoaderOptions) -> _Worker:
    """Start a worker; raise UserError if this machine does not allow it."""
    fix = "lower data.workers (or --workers), or raise the limit on processes (ulimit -u)"
    with explained("A loader process cannot be started", fix):
        try:
            return _Worker(work, options)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # multiprocessing keeps semaphores in shared memory
            raise UserError(f"A loader process cannot be started ({error}); {fix_of_shared_memory()}.") from error


def _stop(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


class _WorkerFailure(Exception):
    """Raised if a worker dies, hangs or cannot send a result; the message names the cause and, if known, a fix."""


class _Worker:
    """A worker process and a thread that receives its results.

    Attributes:
        unfinished: the jobs whose results have not been taken yet, in order.
    """

    def __init__(self, work: Callable[[Any], Any], options: LoaderOptions) -> None:
        self.unfinished: deque[Any] = deque()
        self._options = options
        get_temp_dir()  # creates the folder for sockets that pass tensors; a killed worker would not remove it
        self._jobs = _CONTEXT.Queue()
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_do_jobs, args=(os.getpid(), work, self._jobs, sender), daemon=True)
        self._process.start()
        sender.close()  # only the worker's end stays open, and closes when the worker ends
        self._results: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        device = torch.cuda.current_device() if options.pin_memory else None
        threading.Thread(target=_receive, args=(receiver, self._results, device), daemon=True).start()

    def submit(self, job: Any) -> None:
        """Send a job to the worker."""
        self.unfinished.append(job)
        self._jobs.put(job)

    def next_result(self, waited_for: str) -> Any:
        """Return the result of the first unfinished job, or raise it if it is an exception.

        Raises:
            _WorkerFailure: the worker has died or cannot share a result with this process, or neither a result nor
                shard data has arrived for `options.timeout` seconds, excluding time that the node spends waiting for
                storage.
            UserError: a job raised it, or a limit of this machine prevents this process from receiving the result.
        """
        result, connection_error = self._wait(waited_for)
        if connection_error is not None:
            self._process.join(_POLL)  # sets the process's exit code
            code = self._process.exitcode
            if code is None:
                if fix := fix_of_limit(connection_error):
                    problem = f"The main process cannot receive {waited_for} ({connection_error})"
                    raise UserError(f"{problem}; {fix}.") from connection_error
                raise connection_error
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            advice = ""
            if code == -signal.SIGKILL:
                advice = "; if memory ran out, lower data.workers (or --workers)"
            elif code == -signal.SIGBUS:
                advice = f"; {fix_of_shared_memory()}"
            raise _WorkerFailure(
                f"A loader process died while the main process waited for {waited_for}: {cause}{advice}"
            )
        if isinstance(result, _WorkerFailure):
            raise result  # the job stays unfinished, for the next worker
        self.unfinished.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def _wait(self, waited_for: str) -> tuple[Any, Exception | None]:
        """Return a result, or the error that ended the connection; raise `_WorkerFailure` after the timeout."""
        cache = self._options.cache
        timeout = self._options.timeout
        poll = min(_POLL, timeout / 2)
        with suppress(Empty):
            return self._results.get(timeout=poll)  # most results arrive before the bytes need to be counted
        arrived_bytes = self._arrived_bytes()
        waiting_since = time.monotonic()  # when the timeout began
        while True:
            with suppress(Empty):
                return self._results.get(timeout=poll)
            if cache is not None and cache.waits_for_storage():  # for at most `data.max_outage` seconds
                waiting_since = time.monotonic()
                raise_received_signal()  # the next step may be an hour away
            if time.monotonic() - waiting_since < timeout:
                continue
            bytes_before = arrived_bytes
            arrived_bytes = self._arrived_bytes()
            if arrived_bytes == bytes_before:
                raise _WorkerFailure(
                    f"Timed out after {timeout:g} s waiting for {waited_for}: check the storage or, in a run, raise "
                    "data.timeout"
                )
            waiting_since = time.monotonic()

    def _arrived_bytes(self) -> int:
        """Return how many bytes of complete and partial shards are in the node's cache; 0 without a cache."""
        return 0 if self._options.cache is None else self._options.cache.arrived()

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
            if device is not None and hasattr(result, "pin_memory"):
                result = result.pin_memory()
            received.put((result, None))
            del result  # so that this thread does not keep the pixels alive
    except Exception as error:  # EOFError if the worker has ended, or any other error of a broken connection
        received.put((None, error))
    results.close()


def _do_jobs(parent: int, work: Callable[[Any], Any], jobs: Any, results: Connection) -> None:
    """Run jobs until this process is killed; if a job raises an error, send the error as the job's result."""
    end_with_parent(parent)
    gc.freeze()  # garbage collections would copy the memory that is shared with the parent
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
        try:
            results.send(result)
        except Exception as error:  # nothing has been sent: tensors are moved to shared memory first
            fix = fix_of_limit(error)
            if not fix:
                raise
            results.send(_WorkerFailure(f"A loader process cannot share a batch ({cause_of(error)}): {fix}"))
