"""Check that workers are kept from one series of jobs to the next, are replaced if they die, and end with the pool."""

import errno
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from forks import alive
from held_lock import LOCK, lock_is_free

from neuclip_ds.data.children import process_pool
from neuclip_ds.data.worker_pool import LoaderOptions, WorkerPool
from neuclip_ds.errors import UserError

HERE = Path()
OPTIONS = LoaderOptions(workers=2, prefetch=2, timeout=60)


def square(job: int) -> tuple[int, int]:
    """Return the ID of this process and the square of the job."""
    if job < 0:
        raise UserError(f"{job} is negative")
    return os.getpid(), job * job


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool(square, OPTIONS)) as pool:
        yield pool


def run(pool: WorkerPool, jobs: list[int]) -> tuple[set[int], list[int]]:
    found = list(pool.run(jobs, str, HERE))
    return {pid for pid, _ in found}, [result for _, result in found]


def squares(jobs: list[int]) -> list[int]:
    return [job * job for job in jobs]


def test_workers_survive_from_series_to_series(pool: WorkerPool) -> None:
    series = [list(range(11)), [], [5], list(range(100, 103))]
    found = [run(pool, jobs) for jobs in series]
    assert [results for _, results in found] == [squares(jobs) for jobs in series]
    assert all(pids <= found[0][0] for pids, _ in found)
    assert os.getpid() not in found[0][0] and len(found[0][0]) == 2
    pool.close()
    assert not any(alive(pid) for pid in found[0][0])
    pool.close()  # a second call is harmless


def test_jobs_are_read_only_as_far_ahead_as_workers_prepare(pool: WorkerPool) -> None:
    read: list[int] = []

    def jobs() -> Iterator[int]:
        for job in range(100):
            read.append(job)
            yield job

    with closing(pool.run(jobs(), str, HERE)) as results:
        next(results)
        assert len(read) <= OPTIONS.workers * OPTIONS.prefetch + 1


def test_a_series_that_is_not_read_to_its_end_stops_the_workers(pool: WorkerPool) -> None:
    first = pool.run(range(20), str, HERE)
    pid, _ = next(first)
    first.close()
    assert not alive(pid)
    assert run(pool, [1, 2, 3])[1] == [1, 4, 9]
    forgotten = pool.run(range(20), str, HERE)
    next(forgotten)
    pids, results = run(pool, [4, 5])
    assert results == [16, 25]
    forgotten.close()
    assert all(alive(pid) for pid in pids), "they do not belong to the forgotten series"


def test_a_worker_that_was_killed_meanwhile_is_replaced(pool: WorkerPool, caplog: pytest.LogCaptureFixture) -> None:
    before, _ = run(pool, list(range(8)))
    os.kill(min(before), signal.SIGKILL)
    time.sleep(0.1)
    after, results = run(pool, list(range(30)))
    assert results == squares(list(range(30)))
    assert after & before == {max(before)} and len(after) == 2
    assert "replacing a loader process (attempt 1 of 2)" in caplog.text


def test_an_error_of_a_job_is_raised_and_stops_the_workers(pool: WorkerPool) -> None:
    pids, _ = run(pool, [1, 2])
    with pytest.raises(UserError, match="-7 is negative"):
        run(pool, [3, -7, 4])
    assert not any(alive(pid) for pid in pids)
    assert run(pool, [3])[1] == [9]


class Unshareable:
    """A result that cannot be sent because a limit of the machine is reached."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        raise self.error


FULL = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.parametrize(
    ("error", "fix"),
    [(FULL, "--shm-size"), (OSError(errno.EMFILE, "Too many open files"), "ulimit -n")],
    ids=["shared memory", "open files"],
)
def test_a_limit_that_prevents_sharing_a_batch_is_named(
    error: Exception, fix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(WorkerPool(lambda job: Unshareable(error), OPTIONS)) as pool, pytest.raises(UserError, match=fix):
        run(pool, [1])
    assert "Traceback" not in capfd.readouterr().err


def test_low_limits_are_named_before_workers_start(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as long_path, pytest.raises(UserError, match="TMPDIR"):
        long_path.setattr(tempfile, "tempdir", "/tmp/" + "x" * 160)
        run(pool, [1])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
    try:
        with pytest.raises(UserError, match="ulimit -n"):
            run(pool, [1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert run(pool, [3])[1] == [9]


def test_without_workers_this_process_does_the_jobs() -> None:
    assert run(WorkerPool(square, replace(OPTIONS, workers=0)), [2, 3]) == ({os.getpid()}, [4, 9])


@pytest.fixture
def _default() -> Iterator[None]:
    """Use `forkserver`, the default start method on Linux since Python 3.14; earlier versions use `fork`."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def parent_of_worker(job: int) -> int:
    return os.getppid()


@pytest.mark.usefixtures("_default")
def test_processes_are_children_without_the_locks_of_other_threads() -> None:
    """Both pools start child processes, even if `forkserver` is the default; `process_pool` copies no held lock."""
    with LOCK, process_pool(1) as pool:
        assert pool.submit(lock_is_free).result()
        assert pool.submit(os.getppid).result() == os.getpid()
    with closing(WorkerPool(parent_of_worker, OPTIONS)) as workers:
        assert list(workers.run(range(3), str, HERE)) == [os.getpid()] * 3
