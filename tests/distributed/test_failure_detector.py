"""Check that all ranks end with the same reason, however one of them ends; their "collective" never returns."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from forks import fork

from neuclip_ds.distributed import failure_detector
from neuclip_ds.distributed.environment import RankEnvironment, free_port
from neuclip_ds.distributed.launch import open_store
from neuclip_ds.errors import TrainingDiverged, UserError

RANKS = 3


class Ends(NamedTuple):
    codes: list[int | None]
    logs: list[str]


def in_a_collective() -> None:
    time.sleep(60)


def wait_for_the_end(rank: int) -> None:
    in_a_collective()


def killed_zero(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    in_a_collective()


def killed_with_a_loader_process(rank: int) -> None:
    """Kill rank 1 while its loader process, which has inherited the rank's open files, keeps running."""
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        Path("loader").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    in_a_collective()


def paused(rank: int) -> None:
    """Pause every rank for 2 s; the ranks then end one after another."""
    stop(os.getpid(), 2.0)
    time.sleep(0.5 * rank)


def stopped_zero(rank: int) -> None:
    if rank == 0:
        stop(os.getpid(), 8.0)
    in_a_collective()


def stop(process: int, seconds: float) -> None:
    resume = f"import os, signal, time; time.sleep({seconds}); os.kill({process}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-c", resume])
    os.kill(process, signal.SIGSTOP)


def raised_and_made_others_fail(rank: int) -> None:
    if rank != 2:
        time.sleep(1.0)  # a loaded machine may start rank 2 late
        raise ConnectionError("connection closed by peer")
    raise RuntimeError("the GPU has fallen off the bus")


def mistake_of_one(rank: int) -> None:
    if rank == 1:
        raise UserError("shard 7 cannot be read")
    in_a_collective()


def mistake_of_all(rank: int) -> None:
    time.sleep(0.1 * (RANKS - rank))  # rank 0 is the last to fail
    raise UserError("the batch is too small")


def diverged(rank: int) -> None:
    raise TrainingDiverged("step 3 is not finite")


def diverged_with_a_late_report(rank: int) -> None:
    try:
        diverged(rank)
    finally:
        if rank == 0:
            time.sleep(3.0)
            Path("report").touch()


def done(rank: int) -> None:
    """End rank 0 first; the connections that it closes must not look like a failure."""
    time.sleep(0.3 * rank)


def stopped_long_enough(rank: int) -> None:
    """Suspend rank 0 until the other ranks have ended."""
    if rank == 0:
        stop(os.getpid(), 15.0)
    in_a_collective()


def one_rank(rank: int, folder: str, work: str, local_rank: int = 0, message: bytes = b"") -> None:
    os.chdir(folder)
    sys.stderr = Path(f"{rank}.txt").open("w")  # noqa: SIM115, open until the process ends
    socket.gethostname = lambda: f"node{rank}"
    store = open_store(rank, timedelta(seconds=30))
    failure_detector._POLL_INTERVAL = 0.25
    failure_detector._REPORT_DELAY = 0.5
    failure_detector._STORE_TIMEOUT = 4.0
    with failure_detector.FailureDetector(
        RankEnvironment(rank, local_rank, RANKS), open_store(rank, serve=False), "127.0.0.1"
    ):
        store.set(f"in {rank}", "")  # as a run's process group does when it connects
        store.wait([f"in {other}" for other in range(RANKS)])
        if message and rank == 1:
            store.set("error", message)
        globals()[work](rank)


def ends(folder: Path, work: str, one_node: bool = False, message: bytes = b"") -> Ends:
    """Return the exit codes of all ranks and what each one logged.

    Each rank has its own node unless `one_node` is true. Rank 1 stores `message` as the failure of a rank.
    """
    variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(RANKS):
        local_rank = rank if one_node else 0
        processes.append(fork(one_rank, rank, str(folder), work, local_rank, message, variables=variables))
    for process in processes:
        process.join(40)
        process.kill()
    return Ends([process.exitcode for process in processes], [(folder / f"{r}.txt").read_text() for r in range(RANKS)])


def test_ranks_that_end_one_after_another_report_nothing(tmp_path: Path) -> None:
    assert ends(tmp_path, "done") == ([0, 0, 0], ["", "", ""])


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    ended = ends(tmp_path, "killed_with_a_loader_process")
    os.kill(int((tmp_path / "loader").read_text()), signal.SIGKILL)  # fails if the loader process has ended
    assert ended.codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert "rank 1 on node1 failed: it was killed and reported no error" in ended.logs[rank]


def test_the_death_of_rank_zero_ends_all(tmp_path: Path) -> None:
    ended = ends(tmp_path, "killed_zero")
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    assert all("rank 0 on node0 failed: it was killed" in log for log in ended.logs[1:])


@pytest.mark.parametrize("work", ["killed_zero", "killed_with_a_loader_process"])
def test_one_rank_of_a_node_names_a_killed_rank_whichever_it_is(work: str, tmp_path: Path) -> None:
    ended = ends(tmp_path, work, one_node=True)
    killed = 0 if work == "killed_zero" else 1
    if killed:
        os.kill(int((tmp_path / "loader").read_text()), signal.SIGKILL)
    assert ended.codes == [-signal.SIGKILL if rank == killed else 1 for rank in range(RANKS)]
    logs = [log for rank, log in enumerate(ended.logs) if rank != killed]
    assert "".join(logs).count(f"rank {killed} on node{killed} failed: it was killed") == 1, logs


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b'{"rank": 2, "host": "h", "text": "t", "code": 0}', 1),
        (b'{"rank": 2, "host": "h", "text": "t", "code": 256}', 1),
        (b'{"rank": 2, "host": "h", "text": "t", "code": -1}', 1),
        (b'{"rank": 2, "host": "h", "text": "t", "code": false}', 1),
        (b'{"rank": 2, "host": "h", "text": "t", "code": 0, "is_message": true}', 1),
        (b'{"rank": 2, "host": "h", "text": "t", "code": 143}', 143),
        (b"\xff", 1),
        (b"[1]", 1),
        (b"{}", 1),
    ],
)
def test_no_message_ends_an_unfinished_run_with_success(message: bytes, code: int, tmp_path: Path) -> None:
    ended = ends(tmp_path, "wait_for_the_end", message=message)
    assert ended.codes == [code] * RANKS
    assert not any("Traceback" in log for log in ended.logs)


@pytest.mark.slow
def test_a_suspended_rank_zero_blames_itself(tmp_path: Path) -> None:
    ended = ends(tmp_path, "stopped_long_enough")
    assert ended.codes == [1, 1, 1]
    assert "rank 0 on node0 failed: it did not run for" in ended.logs[0]


@pytest.mark.slow
def test_a_pause_is_not_a_failure_but_a_rank_zero_that_does_not_answer_is(tmp_path: Path) -> None:
    """Other ranks cannot distinguish a stopped process from one whose node hangs."""
    assert ends(tmp_path, "paused") == ([0, 0, 0], ["", "", ""])
    ended = ends(tmp_path, "stopped_zero")
    assert ended.codes[1:] == [1, 1]
    assert all("rank 0 on node0 failed: it has not answered for 4 s" in log for log in ended.logs[1:])


def test_the_first_exception_is_logged_with_its_rank(tmp_path: Path) -> None:
    ended = ends(tmp_path, "raised_and_made_others_fail")
    assert ended.codes == [1, 1, 1]
    assert ["Traceback" in log for log in ended.logs] == [False, False, True]
    assert "rank 2 on node2 failed" in ended.logs[2]
    for log in ended.logs[:2]:
        assert log == "ended because rank 2 on node2 failed: RuntimeError: the GPU has fallen off the bus\n"


def test_rank_zero_prints_the_mistake_of_another_rank(tmp_path: Path) -> None:
    ended = ends(tmp_path, "mistake_of_one")
    assert ended == ([2, 2, 2], ["error: rank 1 on node1: shard 7 cannot be read\n", "", ""])


def test_a_mistake_of_all_is_printed_once(tmp_path: Path) -> None:
    assert ends(tmp_path, "mistake_of_all") == ([2, 2, 2], ["error: the batch is too small\n", "", ""])
    assert ends(tmp_path, "diverged") == ([1, 1, 1], ["error: step 3 is not finite\n", "", ""])


def test_rank_zero_has_time_for_its_report(tmp_path: Path) -> None:
    assert ends(tmp_path, "diverged_with_a_late_report").codes == [1, 1, 1]
    assert (tmp_path / "report").exists()
