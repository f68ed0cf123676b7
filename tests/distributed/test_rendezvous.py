"""Check the rendezvous of ranks, run as threads: missing ranks, duplicate ranks, and ranks whose configs differ."""

import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuclip_ds.distributed import launch
from neuclip_ds.distributed.environment import RankEnvironment, free_port
from neuclip_ds.distributed.launch import open_store, rendezvous
from neuclip_ds.distributed.stop_signals import raising_interrupted
from neuclip_ds.errors import Interrupted, UserError

FINGERPRINT = {"config": "seed: 0\nbatch_size: 8\n", "neuclip_ds": "abc"}


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def outcomes(ranks: Sequence[tuple[Any, ...]], seconds: float = 20) -> list[Any]:
    """Return each rank's store or error message; `ranks` are (rank, world size, fingerprint, optional problem)."""

    def outcome(rank: int, world_size: int, fingerprint: Mapping[str, str], problem: str = "") -> str | dist.Store:
        try:
            limit = timedelta(seconds=seconds)
            store = open_store(rank, limit)
            joined = rendezvous(store, RankEnvironment(rank, 0, world_size), fingerprint, problem, limit)
        except UserError as error:
            return str(error)
        return dist.PrefixStore(joined.attempt, store)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(outcome, *rank) for rank in ranks]
        return [future.result() for future in futures]


def test_all_ranks_arrive_and_share_a_store() -> None:
    stores = outcomes([(2, 3, FINGERPRINT), (0, 3, FINGERPRINT), (1, 3, FINGERPRINT)])
    assert all(isinstance(store, dist.Store) for store in stores)
    stores[0].set("said", "by rank 2")
    assert stores[2].get("said") == b"by rank 2"


@pytest.mark.parametrize(
    ("others", "parts"),
    [
        (
            [(1, 2, {**FINGERPRINT, "config": "seed: 0\nbatch_size: 16\n"})],
            ["differs", "config", "batch_size: 8", "batch_size: 16"],
        ),
        ([(1, 2, {**FINGERPRINT, "neuclip_ds": "def"})], ["differs", "neuclip_ds", "abc", "def"]),
        ([(2, 3, FINGERPRINT)], ["rank 2 on ", "number of ranks", "slots"]),
    ],
)
def test_all_ranks_report_the_same_difference(
    others: list[tuple[int, int, Mapping[str, str]]], parts: list[str]
) -> None:
    first, *other_messages = outcomes([(0, 2, FINGERPRINT), *others])
    assert isinstance(first, str)
    assert all(word.lower() in first.lower() for word in parts), first
    assert other_messages == [first] * len(other_messages)


def test_two_nodes_with_the_same_node_rank_are_refused() -> None:
    messages = outcomes([(0, 3, FINGERPRINT), (1, 3, FINGERPRINT), (1, 3, FINGERPRINT)])
    assert len(set(messages)) == 1
    assert "Two processes are rank 1" in str(messages[0])


def test_ranks_with_different_devices_or_versions_of_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = launch._fingerprint("config")
    accelerator = SimpleNamespace(device_name=lambda: "cuda", communication_backend_name=lambda: "nccl")
    monkeypatch.setattr(launch, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    gpu = launch._fingerprint("config")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    other_nccl = launch._fingerprint("config")
    for other, devices in ((cpu, "cpu, gloo"), (other_nccl, r"cuda, nccl 2.29.3")):
        first, second = outcomes([(0, 2, gpu), (1, 2, other)])
        assert first == second
        assert re.search(rf"^Rank \d on .* in its devices \(.*{devices}", first) and "cuda, nccl 2.30.7" in first


def test_the_problem_of_one_rank_ends_all_ranks_at_once() -> None:
    """The other ranks do not wait for rank 2, which never arrives."""
    first, second = outcomes([(0, 3, FINGERPRINT, ""), (1, 3, FINGERPRINT, "no GPU here")])
    assert first == second == f"rank 1 on {socket.gethostname()}: no GPU here"


def test_missing_ranks_are_named() -> None:
    first, second = outcomes([(0, 6, FINGERPRINT), (2, 6, FINGERPRINT)], seconds=1)
    assert "1, 3, 4, 5" in str(first)
    assert second == first


def test_a_rank_without_rank_zero_reports_its_address_and_the_fix() -> None:
    (message,) = outcomes([(1, 2, FINGERPRINT)], seconds=1)
    assert "waited 1 s for rank 0 at 127.0.0.1:" in str(message)
    assert "--master_addr" in str(message)


def test_a_port_that_another_program_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        (message,) = outcomes([(0, 2, FINGERPRINT)], seconds=2)
    assert "cannot listen" in str(message)
    assert "--master_port" in str(message)


@pytest.mark.parametrize("has_server", [False, True])
def test_a_signal_ends_a_rank_that_waits_for_the_others(has_server: bool) -> None:
    if has_server:
        server = open_store(0)  # rank 0 has opened the store, but does not compare the ranks
        assert server is not None
    limit = timedelta(seconds=20)
    started = time.monotonic()
    with pytest.raises(Interrupted), raising_interrupted():
        Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        store = open_store(1, limit)
        rendezvous(store, RankEnvironment(1, 0, 2), FINGERPRINT, timeout=limit)
    assert time.monotonic() - started < limit.total_seconds() / 2, "the signal ends the wait, not the limit"


@pytest.mark.parametrize("content", [b"\xff", b"null", b'{"rank": 1}', b'{"problem": 3, "processes": []}'])
def test_unreadable_entries_of_the_store_end_the_ranks_with_one_error(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_STORE_DELAY", 0.1)
    monkeypatch.setattr(launch.secrets, "token_hex", lambda size: "name")
    server = open_store(0)
    attempt = dist.PrefixStore("name", server)
    attempt.add("arrivals", 1)
    attempt.set("arrival/1", content)
    (message,) = outcomes([(0, 2, FINGERPRINT)], seconds=5)
    assert "unreadable entry 'arrival/1'" in str(message)
    assert "--master_port" in str(message)
    attempt.set("verdict", content)
    (message,) = outcomes([(1, 2, FINGERPRINT)], seconds=5)
    assert "unreadable entry 'verdict'" in str(message)


def test_ranks_that_torchrun_restarts_do_not_read_what_earlier_ranks_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives the ranks, and its restart count may differ between nodes.

    Rank 0 arrives first or last, after a rendezvous that succeeded or failed.
    """
    server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    others = [(1, 3, FINGERPRINT), (2, 3, FINGERPRINT)]
    failing = (1, 3, FINGERPRINT, "no GPU here")
    for ranks in ([(0, 3, FINGERPRINT), *others], [*others, (0, 3, FINGERPRINT)]):
        stores = outcomes(ranks)
        assert all(isinstance(store, dist.Store) for store in stores), stores
        assert not any(store.check(["rank/0"]) for store in stores)
        stores[0].set("rank/0", "address")
        assert all(store.check(["rank/0"]) for store in stores)
        assert outcomes([(0, 3, FINGERPRINT), failing])[0] == f"rank 1 on {socket.gethostname()}: no GPU here"
    assert server.num_keys() > 0
