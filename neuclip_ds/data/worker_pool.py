"""Worker processes that do jobs in order: replaced where they die or hang, ended with the process that has them."""

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

MAX_FAILURES = 3  # of the worker whose result is due, in a row
PROCESS_NAME = "loader"  # of workers, as ps and top show it

_CONTEXT = multiprocessing.get_context("fork")  # workers share the manifest's memory, and import nothing again
_POLL = 1.0  # seconds between checks while a result is waited for
_LONGEST = 10  # time-outs for which a result is waited for while shards arrive


class LoaderOptions(NamedTuple):
    """How batches are loaded, which does not change their contents."""

    workers: int = 2  # number of loader processes; 0 loads in this process
    prefetch: int = 4  # batches, or parts of them, that each worker prepares ahead
    timeout: float = 300  # seconds to wait for a batch
    captions: CaptionSources = ("txt",)  # as `data.captions`
    cache: ShardCache | None = None  # of remote shards, or of all
    pin_memory: bool = False  # whether batches are in pinned memory


class WorkerPool:
    """Loader processes that do jobs, and survive from one series of jobs to the next.

    They are forked when the first series begins.

    Args:
        work: does a job, in a worker; in this process without workers. May raise `UserError`. In pinned memory come
            results that have a method `pin_memory`.
    """

    def __init__(self, work: Callable[[Any], Any], options: LoaderOptions) -> None:
        self._work, self._options = work, options
        self._workers: list[_Worker] = []

    def run(self, jobs: Iterable[Any], describe: Callable[[int], str], folder: Path) -> Generator[Any, None, None]:
        """Yield the results of jobs in order; a worker that fails is replaced, and its jobs are done again.

        A series that is not read to its end stops the workers. The next one starts others.

        Args:
            jobs: what can be pickled; read as far ahead as the workers may prepare.
            describe: from a job's number to what is waited for, for messages.
            folder: of the shards, for messages.

        Raises:
            UserError: of a job, or workers repeatedly die or exceed `options.timeout`.
        """
        count = self._options.workers
        if not count:
            yield from map(self._work, jobs)
            return
        if any(worker.due for worker in self._workers):  # of a series that nobody reads any more
            self.close()
        if not self._workers:
            atexit.register(self.close)
            self._workers = [_Worker(self._work, self._options) for _ in range(count)]
        workers, places = self._workers, itertools.cycle(range(count))
        given = zip(places, jobs, strict=False)  # the place of each job's worker

        def give(number: int) -> int:
            chosen = list(itertools.islice(given, number))
            for place, job in chosen:
                workers[place].give(job)
            return len(chosen)

        try:
            ahead = give(count * self._options.prefetch)
            for number in itertools.count():
                if not ahead:
                    return
                where = f"from {count} loader processes (shards in {folder})"
                result = self._take(workers, number % count, f"{describe(number)} {where}")
                ahead += give(1) - 1
                yield result
        except BaseException:  # also where the caller closes this generator
            _stop(workers)
            raise

    def close(self) -> None:
        """Stop the workers, if there are any. They have nothing to save."""
        atexit.unregister(self.close)
        _stop(self._workers)
        self._workers = []

    def _take(self, workers: list[_Worker], place: int, waited_for: str) -> Any:
        """Return the next result of the worker at a place, which is replaced where it fails."""
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
    """A worker died or does not respond; the message has the cause and a fix."""


class _Ended(NamedTuple):
    """What a worker's receiver ends with."""

    error: Exception


class _Worker:
    """A worker process, and the thread that receives its results.

    Attributes:
        due: the jobs that it was given and whose results have not been taken.
    """

    def __init__(self, work: Callable[[Any], Any], options: LoaderOptions) -> None:
        self.due: deque[Any] = deque()
        self._options = options
        get_temp_dir()  # of sockets that hand over tensors: this process's, as a killed worker does not remove its own
        self._jobs = _CONTEXT.Queue()
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        arguments = os.getpid(), work, self._jobs, sender
        self._process = _CONTEXT.Process(target=_do_jobs, args=arguments, daemon=True)
        self._process.start()
        sender.close()  # the worker's end alone is open: it closes when the worker ends
        self._results: SimpleQueue[Any] = SimpleQueue()
        device = torch.cuda.current_device() if options.pin_memory else None
        threading.Thread(target=_receive, args=(receiver, self._results, device), daemon=True).start()

    def give(self, job: Any) -> None:
        """Give it another job."""
        self.due.append(job)
        self._jobs.put(job)

    def take(self, waited_for: str) -> Any:
        """Return the next result; raise `_WorkerFailure` if the worker has died, or nothing has come for too long."""
        result = self._wait(waited_for)
        if isinstance(result, _Ended):
            self._process.join(_POLL)  # sets its exit code
            code = self._process.exitcode
            if code is None:
                raise result.error
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise _WorkerFailure(
                f"A loader process died while waiting for {waited_for}: {end}; "
                "if memory ran out, lower data.workers or data.prefetch"
            )
        self.due.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def _wait(self, waited_for: str) -> Any:
        """Wait for the next result, up to `options.timeout` in which no shard arrives.

        While shards arrive that is ten times as long, besides the time that the node waits for its storage.
        """
        cache, timeout = self._options.cache, self._options.timeout
        since, turns, arrived = time.monotonic(), 0, -1
        while True:
            with suppress(Empty):
                return self._results.get(timeout=min(_POLL, timeout / 2))
            if cache is not None and cache.waits_for_storage():  # which workers end after `data.max_outage`
                since = time.monotonic()
                with deferring(False):  # a signal ends the run now: no step may come for an hour
                    pass
            over = time.monotonic() - since >= timeout
            if over or arrived < 0:
                before, arrived = arrived, cache.arrived() if cache is not None else 0
            if over:
                since, turns = time.monotonic(), turns + 1
                if arrived == before or turns == _LONGEST:
                    raise _WorkerFailure(
                        f"Timed out after {timeout:g} s waiting for {waited_for}: "
                        "check that the storage responds, or raise data.timeout"
                    )

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()  # else it stays a zombie
        self._jobs.cancel_join_thread()
        self._jobs.close()


def _receive(results: Connection, received: SimpleQueue[Any], device: int | None) -> None:
    """Pass on a worker's results, in memory pinned for the device if there is one, and how they end."""
    try:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        while True:
            result = results.recv()
            received.put(result.pin_memory() if device is not None and hasattr(result, "pin_memory") else result)
    except Exception as error:  # EOFError where the worker has ended, or any other of a connection that breaks
        received.put(_Ended(error))
    results.close()


def _do_jobs(parent: int, work: Callable[[Any], Any], jobs: Any, results: Connection) -> None:
    """Do jobs until this process is killed; an error is a result."""
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
