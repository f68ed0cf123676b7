"""Processes that end with the one that starts them, even when that is killed."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from neuclip_ds.distributed.stop_signals import STOP_SIGNALS
from neuclip_ds.errors import UserError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int) -> None:
    """Be killed with process `parent`, and by nothing else that stops a run.

    Signals that stop a run are ignored: launchers and terminals send them to every process of the tree, but the parent
    decides when its helpers end.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    be_killed_with(parent)


def killed_with_parent() -> Callable[[], None]:
    """Return the `preexec_fn` of a program that the kernel (Linux's) kills when this process ends."""
    return partial(be_killed_with, os.getpid())


def be_killed_with(parent: int) -> None:
    """Make the kernel (Linux's) kill this process when process `parent`, which has started it, ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the call
        os._exit(1)


@contextmanager
def process_pool(processes: int, start_method: str | None = None) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes, which end with the block, and at once when the block fails.

    Raises:
        UserError: one of them was killed.
    """
    context = get_context(start_method)
    pool = ProcessPoolExecutor(processes, context, initializer=end_with_parent, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                f"One of {processes} worker processes was killed; if memory ran out, use fewer of them."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
