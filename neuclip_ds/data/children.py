"""Child processes that end with their parent, even if the parent is killed."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any, TypeVar

from neuclip_ds.distributed.stop_signals import STOP_SIGNALS
from neuclip_ds.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_TIMEOUT = 2.0  # longest time in seconds until the exit code of a process that has ended is known
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Ignore stop signals, and make the Linux kernel kill this process when its parent, with process ID `parent`, ends.

    Launchers and terminals send stop signals to every process in the tree, but the parent decides when its child
    processes end.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


class _Process(SpawnProcess):
    """A spawned process that does not import this program's main module.

    By default, a spawned process imports that module: it runs a script without a main guard again, and fails if the
    program was read from standard input. Functions to call in this process must not be defined in the main module.
    """

    def start(self) -> None:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _ProcessStarter(SpawnContext):
    """A multiprocessing context that starts processes of the class `_Process` and keeps a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        process = _Process(*args, **kwargs)
        self.started.append(process)
        return process


@contextmanager
def process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes, which end when the block ends and are killed if it raises an exception.

    Processes are spawned, because forking a process with threads (NCCL, fsspec, failure detector) can cause a hang.
    They do not import the main module. The main module therefore needs no main guard, and the pool cannot call
    functions that are defined there.

    Raises:
        UserError: one of the processes was killed or exited before the block ended.
    """
    context = _ProcessStarter()
    pool = ProcessPoolExecutor(processes, context, initializer=end_with_parent, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException as error:
        end = _describe_first_end(context.started) if isinstance(error, BrokenProcessPool) else ""
        for process in context.started:
            if process.is_alive():
                process.kill()
        if end:
            raise UserError(f"One of {processes} worker processes {end}.") from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_processes(function: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[R]:
    """Yield the results of a function for the items, in order.

    A `process_pool` calls the function or, if `processes` is 1, this process. Exceptions of the function are raised.

    Raises:
        UserError: a process of the pool was killed or exited before the last result.
    """
    if processes == 1:
        yield from map(function, items)
        return
    with process_pool(processes) as pool:
        yield from pool.map(function, items)


def _describe_first_end(processes: Sequence[SpawnProcess]) -> str:
    """Describe the end of the process that broke a pool; the pool has sent SIGTERM to the other processes."""
    deadline = time.monotonic() + _REAP_TIMEOUT
    codes: list[int] = []
    while not codes and time.monotonic() < deadline:  # a thread of the pool may be reading the exit code
        time.sleep(0.01)
        codes = [code for process in processes if (code := process.exitcode) not in (None, 0, -signal.SIGTERM)]
    return describe_exit(min(codes)) if codes else "ended early"


def describe_exit(code: int) -> str:
    """Describe how a child process ended and, where possible, suggest a fix.

    `code` is the exit code of the process, which is -N if signal N ended the process.
    """
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL); if memory ran out, close other programs, or lower --processes (build-manifest)"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}; its output above may name the reason"
