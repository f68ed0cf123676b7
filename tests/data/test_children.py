"""Helper processes: started alike whatever Python's default is, and without the locks of the process's threads."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from neuclip_ds.data.children import process_pool
from neuclip_ds.data.worker_pool import LoaderOptions, WorkerPool

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    """The default start method of Python 3.14; of others on Linux it is `fork`."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def lock_is_free() -> bool:
    return LOCK.acquire(blocking=False)


def parent_of_worker(job: int) -> int:
    return os.getppid()


def test_a_pool_has_no_lock_of_another_thread() -> None:
    with LOCK, process_pool(1) as pool:
        assert pool.submit(lock_is_free).result()
        assert pool.submit(os.getppid).result() == os.getpid()


def test_loader_processes_are_children() -> None:
    with closing(WorkerPool(parent_of_worker, LoaderOptions(workers=2, timeout=60))) as pool:
        assert list(pool.run(range(3), str, Path())) == [os.getpid()] * 3
