"""Connect two ranks as launched ranks do: the network that they choose, GPUs that fail, and ranks that hang."""

import os
import platform
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from forks import fork, kill

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.distributed import environment, failure_detector, launch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import free_port
from neuclip_ds.distributed.launch import reuse_freed_memory
from neuclip_ds.errors import UserError

_LARGE = 2**24  # float32 elements of a block that glibc maps from the kernel by default


def connect(communicator: Communicator) -> None:
    communicator.raise_if_any_rank_failed(None)
    print(os.environ["GLOO_SOCKET_IFNAME"], file=sys.stderr)


def stop_rank_1(communicator: Communicator) -> None:
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    communicator.raise_if_any_rank_failed(None)


def hang_rank_1(communicator: Communicator) -> None:
    if communicator.rank == 1:
        signal.signal(signal.SIGCONT, lambda number, frame: None)
        signal.pause()
    communicator.raise_if_any_rank_failed(None)


def lack_gpu(communicator: Communicator) -> None:
    raise AssertionError("the ranks must not connect")


def never_join(communicator: Communicator) -> None:
    raise AssertionError("the ranks must not connect")


def one_rank(rank: int, folder: str, work: str) -> None:
    os.chdir(folder)
    sys.stderr = Path(f"{rank}.txt").open("w", buffering=1)  # noqa: SIM115, open until the process ends
    socket.gethostname = lambda: f"node{rank}"
    failure_detector._POLL_INTERVAL = 0.25
    failure_detector._STUCK_AFTER = 1.0
    failure_detector._STUCK_SPREAD = 1.5
    if work == "lack_gpu" and rank == 1:
        del os.environ["DS_ACCELERATOR"]
        environment.find_gpus = lambda: ["/dev/nvidia0"]
    if work == "never_join":
        failure_detector._CONNECT_TIMEOUT = 1.0
        if rank == 1:
            dist.init_process_group = lambda *args, **kwargs: time.sleep(60)
    with exit_on_mistake(), launch.process_group("task") as communicator:
        globals()[work](communicator)


@contextmanager
def started(folder: Path, work: str, *addresses: str) -> Iterator[list[BaseProcess]]:
    """Start both ranks, each as the first rank of a node; `addresses` are rank 0's addresses as seen by each rank."""
    shared = {"MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "DS_ACCELERATOR") if name in os.environ}
    processes = []
    try:
        for rank, address in enumerate(addresses or ("127.0.0.1", "127.0.0.1")):
            variables = {**kept, **shared, "RANK": str(rank), "MASTER_ADDR": address}
            processes.append(fork(one_rank, rank, str(folder), work, variables=variables))
        yield processes
    finally:
        for process in processes:
            kill(process)


def ends(folder: Path, processes: list[BaseProcess]) -> list[tuple[int | None, str]]:
    """Return the exit code and the output of each rank."""
    for process in processes:
        process.join(60)
    return [(process.exitcode, (folder / f"{rank}.txt").read_text()) for rank, process in enumerate(processes)]


def test_gloo_takes_the_network_in_which_the_nodes_reach_rank_0(tmp_path: Path) -> None:
    """Rank 0's host name resolves to a loopback address on its own machine, as on Debian."""
    interfaces: dict[str, str] = {}  # by address
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family is socket.AF_INET and not entry.address.startswith("127."):
                interfaces[entry.address] = name
    if not interfaces:
        pytest.skip("needs a network")
    address, interface = next(iter(interfaces.items()))
    with started(tmp_path, "connect", "127.0.1.1", address) as processes:
        assert ends(tmp_path, processes) == [(0, f"{interface}\n")] * 2


def test_one_machine_needs_no_network(tmp_path: Path) -> None:
    with started(tmp_path, "connect") as processes:
        assert ends(tmp_path, processes) == [(0, "lo\n")] * 2


def test_gpus_that_one_node_cannot_use_end_all(tmp_path: Path) -> None:
    with started(tmp_path, "lack_gpu") as processes:
        for code, printed in ends(tmp_path, processes):
            assert code == 2
            assert "rank 1 on node1: node1 has GPUs (/dev/nvidia0), but torch cannot use them" in printed


def test_one_rank_without_a_launcher_needs_its_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "find_gpus", lambda: ["/dev/kfd"])
    with pytest.raises(UserError, match=r"has GPUs \(/dev/kfd\)"), launch.process_group("task"):
        pass
    assert "RANK" not in os.environ  # otherwise, later commands of a notebook take it for a launcher's


def test_ranks_that_do_not_connect_end_with_the_variables_to_set(tmp_path: Path) -> None:
    with started(tmp_path, "never_join") as processes:
        (code_0, printed_0), (code_1, _) = ends(tmp_path, processes)
    assert [code_0, code_1] == [2, 2]
    assert "GLOO_SOCKET_IFNAME" in printed_0 and printed_0.count("error: ") == 1


@pytest.mark.parametrize(
    ("work", "doing"),
    [
        pytest.param("stop_rank_1", "is busy or stopped", marks=pytest.mark.slow),
        ("hang_rank_1", "is at .*test_process_group.py:.* in hang_rank_1"),
    ],
)
def test_a_rank_that_hangs_is_named(work: str, doing: str, tmp_path: Path) -> None:
    with started(tmp_path, work) as processes:
        deadline = time.monotonic() + 60
        while "the run has made no progress" not in (
            log := "".join(path.read_text() for path in tmp_path.glob("*.txt"))
        ):
            assert time.monotonic() < deadline, "no rank is named"
            time.sleep(0.1)
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGCONT)
        assert [code for code, _ in ends(tmp_path, processes)] == [0, 0]
    assert log.count("\n") == 1
    assert re.search(f"the ranks wait for rank 1 on node1, which {doing}", log)


def write_page_faults_of_large_tensors(file: Path) -> None:
    reuse_freed_memory()
    for _ in range(4):  # the heap grows to its final size
        torch.ones(_LARGE)
    faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(_LARGE)
    file.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")
def test_a_new_large_tensor_reuses_freed_memory(tmp_path: Path) -> None:
    def page_faults(**variables: str) -> int:
        process = fork(write_page_faults_of_large_tensors, tmp_path / "faults", variables=variables)
        process.join()
        return int((tmp_path / "faults").read_text())

    pages = 4 * _LARGE // resource.getpagesize()
    assert page_faults() < pages
    assert page_faults(MALLOC_ARENA_MAX="4") > 3 * pages, "settings in the environment take precedence"
