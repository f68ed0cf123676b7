"""Check collectives on real gloo ranks, their traffic counts, and errors that are raised on all ranks."""

import pickle
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from neuclip_ds.checkpoint.integrity import SaveFailed
from neuclip_ds.distributed import launch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError


def collect(communicator: Communicator) -> dict[str, Any]:
    rank = communicator.rank
    x = torch.arange(6.0).reshape(3, 2) + 10 * rank
    rows = torch.arange(float(4 * communicator.world_size)).reshape(-1, 2)
    before = x.clone()
    result = {
        "gathered": communicator.all_gather(x, "features"),
        "sum": communicator.all_reduce(x, "scalars"),
        "own": communicator.reduce_scatter(rows * (rank + 1), "state"),
    }
    assert torch.equal(x, before), "the arguments stay as they are"
    return {**result, "traffic": dict(communicator.traffic)}


def fail(communicator: Communicator) -> list[str]:
    """Return the messages of two errors: a job that fails on rank 0, and a problem on the last rank only."""

    def job() -> None:
        raise SaveFailed("the disk is full")

    messages = []
    alone = "no shard" if communicator.rank == communicator.world_size - 1 else None
    for work in (lambda: communicator.on_rank_zero(job), lambda: communicator.raise_if_any_rank_failed(alone)):
        try:
            work()
        except UserError as error:
            messages.append(f"{type(error).__name__}: {error}")
    communicator.raise_if_any_rank_failed(None)
    assert communicator.on_rank_zero(lambda: communicator.rank + 7) == 7
    return messages


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives(world_size: int) -> None:
    ranks = run_ranks(world_size, collect)
    x = [torch.arange(6.0).reshape(3, 2) + 10 * rank for rank in range(world_size)]
    rows = torch.arange(float(4 * world_size)).reshape(-1, 2) * sum(range(1, world_size + 1))
    for number, found in enumerate(ranks):
        assert torch.equal(found["gathered"], torch.cat(x))
        assert torch.equal(found["sum"], sum(x))
        assert torch.equal(found["own"], rows[2 * number : 2 * number + 2])
        traffic = found["traffic"]
        assert traffic["features"].bytes_sent == (world_size - 1) * 6 * 4
        assert traffic["scalars"].bytes_sent == 2 * (world_size - 1) * 24 // world_size
        assert traffic["state"].bytes_sent == (world_size - 1) * 4 * 4
        assert all(counted.calls == 1 and counted.seconds > 0 for counted in traffic.values())


def gather_on_hosts(communicator: Communicator) -> list[Any]:
    """Gather a host tensor through a separate gloo group and through the default group."""
    separate = Communicator(host_group=dist.new_group(backend="gloo"))
    x = torch.tensor([communicator.rank])
    found = [ranks.begin_host_gather(x, "features").wait().tolist() for ranks in (separate, communicator)]
    return [*found, separate.gather_objects(communicator.rank), separate.on_rank_zero(lambda: 7)]


def test_host_tensors_are_gathered_whatever_the_group_carries() -> None:
    assert run_ranks(2, gather_on_hosts) == [[[0, 1], [0, 1], [0, 1], 7]] * 2


def join_with_gpus(communicator: Communicator) -> list[Any]:
    """Join with a fake GPU accelerator whose backend is gloo."""
    gpu = SimpleNamespace(current_device_name=lambda: "cuda:0", communication_backend_name=lambda: "gloo")
    with patch.object(launch, "get_accelerator", lambda: gpu):
        joined = launch.join()
    gathered = joined.begin_host_gather(torch.tensor([joined.rank]), "features").wait()
    with patch.object(dist, "new_group", wraps=dist.new_group) as made:
        size = dist.get_world_size(joined.own_group) if joined.rank == 1 else 1
    made_of = [call.kwargs["backend"] for call in made.mock_calls]
    return [str(joined.device), joined._host_group is not None, gathered.tolist(), size, made_of]


def test_ranks_with_gpus_have_a_group_of_hosts_and_one_of_their_own() -> None:
    """A rank's separate group uses gloo, because NCCL would split the group from the global one."""
    common = ["cuda:0", True, [0, 1], 1]
    assert run_ranks(2, join_with_gpus) == [[*common, []], [*common, ["gloo"]]]


def subnormals_left(size: int = 2**20) -> int:
    return int((torch.full((size,), 2.0**-126) / 2).count_nonzero())


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush subnormal numbers")
def test_subnormal_numbers_are_zero_in_every_thread_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = [subnormals_left(1)]
    with launch.process_group("task"):
        thread = threading.Thread(target=lambda: found.append(subnormals_left(1)))
        thread.start()
        thread.join()
        found += [subnormals_left(), subnormals_left(1)]
    assert found == [1, 0, 0, 0]
    assert subnormals_left(1) == 1


def test_one_rank_is_free() -> None:
    assert collect(Communicator())["traffic"] == {}


@pytest.mark.parametrize("world_size", [1, 2])
def test_errors_reach_all_ranks(world_size: int) -> None:
    ranks = run_ranks(world_size, fail) if world_size > 1 else [fail(Communicator())]
    own = "no shard" if world_size == 1 else f"rank 1 on {socket.gethostname()}: no shard"
    assert ranks == [["SaveFailed: the disk is full", f"UserError: {own}"]] * world_size


def exchange(communicator: Communicator) -> list[Any]:
    """Gather and broadcast JSON whose size differs between ranks, then bytes from rank 1 that are not JSON."""
    rank = communicator.rank
    mine = {"text": "\udcff é" * rank, "numbers": [rank, -0.1, float("inf"), 2**62], "none": None}
    found: list[Any] = [
        communicator.gather_objects(mine)
        == [
            {**mine, "text": "\udcff é" * r, "numbers": [r, -0.1, float("inf"), 2**62]}
            for r in range(communicator.world_size)
        ]
    ]
    found.append(communicator.on_rank_zero(lambda: ["of", {"rank": rank}]))
    with patch("json.dumps", lambda x: repr(pickle.dumps(x)) if rank == 1 else "{}"):
        try:
            communicator.gather_objects(Path())
        except UserError as error:
            found.append(str(error))
    return found


def test_ranks_exchange_json_and_nothing_else() -> None:
    for same, zero, refused in run_ranks(2, exchange):
        assert same
        assert zero == ["of", {"rank": 0}]
        assert "Rank 1 sent bytes that are not JSON" in refused


@pytest.mark.parametrize("value", [{"a": [{1}]}, Path("a"), torch.zeros(1), b"", SaveFailed("x")])
def test_what_json_does_not_hold_is_refused_also_on_one_rank(value: Any) -> None:
    with pytest.raises(TypeError):
        Communicator().gather_objects(value)
    with pytest.raises(TypeError):
        Communicator().on_rank_zero(lambda: value)


def count(communicator: Communicator) -> list[int]:
    return [communicator.count("turns") for _ in range(3)]


def test_a_counter_is_shared() -> None:
    assert count(Communicator()) == [1, 2, 3]
    first, second = run_ranks(2, count)
    assert sorted(first + second) == [1, 2, 3, 4, 5, 6]


def test_rows_that_ranks_do_not_divide() -> None:
    communicator = Communicator()
    communicator.world_size = 2
    with pytest.raises(ValueError, match="3 rows over 2 ranks"):
        communicator.reduce_scatter(torch.zeros(3, 1), "state")
