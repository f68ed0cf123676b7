"""Child processes that end with their parent, even if the parent is killed."""

import ctypes
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from neuclip_ds.distributed.stop_signals import STOP_SIGNALS
from neuclip_ds.errors import UserError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Ignore stop signals, and make the Linux kernel kill this process when its parent process, `parent`, ends.

    Launchers and terminals send stop signals to every process in the tree, but the parent decides when its child
    processes end.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


@contextmanager
def process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes, which end when the block ends and are killed if it raises an exception.

    Processes are spawned, because forking a process with threads (NCCL, fsspec, failure detector) can cause a hang.

    Raises:
        UserError: one of the processes was killed.
    """
    others = active_children()
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=end_with_parent, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException as error:
        for process in active_children():
            if process not in others:
                process.kill()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                f"One of {processes} worker processes was killed; if memory ran out, use fewer of them."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
