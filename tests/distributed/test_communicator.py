"""Check collectives on real gloo ranks, their traffic counts, and errors that are raised on all ranks."""

import math
import pickle
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from ranks import run_ranks

from neuclip_ds.checkpoint.integrity import SaveFailed
from neuclip_ds.distributed import launch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError


class DiskFull(SaveFailed):
    """An error whose class is a subclass of a subclass of `UserError`."""


class MissingShards(UserError):
    """An error that is not constructed from its message."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} shards are missing")


def collect(communicator: Communicator) -> dict[str, Any]:
    rank = communicator.rank
    x = torch.arange(6.0).reshape(3, 2) + 10 * rank
    rows = torch.arange(float(4 * communicator.world_size)).reshape(-1, 2)
    before = x.clone()
    result = {
        "gathered": communicator.all_gather(x, "features"),
        "sum": communicator.all_reduce(x, "scalars"),
        "scattered": communicator.reduce_scatter(rows * (rank + 1), "state"),
    }
    assert torch.equal(x, before), "the arguments stay as they are"
    reduced = communicator.begin_reduce(x.clone(), owner=1, purpose="weights").wait()
    assert rank != 1 or torch.equal(reduced, result["sum"])
    return {**result, "traffic": dict(communicator.traffic)}


def raised(work: Callable[[], object]) -> str:
    """Return the class and the message of the `UserError` that `work` raises."""
    with pytest.raises(UserError) as caught:
        work()
    return f"{caught.type.__name__}: {caught.value}"


def fail(communicator: Communicator) -> list[str]:
    """Return the errors of jobs that fail on rank 0, and of a problem on the last rank only."""
    error_classes: list[Callable[[str], UserError]] = [UserError, SaveFailed, DiskFull]
    if communicator.rank == 0:

        class KnownToRankZero(DiskFull):
            """An error whose class the other ranks do not have."""

        error_classes.append(KnownToRankZero)
    else:
        error_classes.append(DiskFull)
    errors = [error_class("the disk is full") for error_class in error_classes]
    errors.append(MissingShards(3))

    messages = []
    for error in errors:
        job = Mock(side_effect=error)
        messages.append(raised(lambda job=job: communicator.on_rank_zero(job)))
        assert job.called == (communicator.rank == 0)
    problem = "no shard" if communicator.rank == communicator.world_size - 1 else None
    messages.append(raised(lambda: communicator.raise_if_any_rank_failed(problem)))
    communicator.raise_if_any_rank_failed(None)
    assert communicator.on_rank_zero(lambda: communicator.rank + 7) == 7
    return messages


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_return_sums_and_rows_of_all_ranks_and_count_their_bytes(world_size: int) -> None:
    ranks = run_ranks(world_size, collect)
    x = [torch.arange(6.0).reshape(3, 2) + 10 * rank for rank in range(world_size)]
    rows = torch.arange(float(4 * world_size)).reshape(-1, 2) * sum(range(1, world_size + 1))
    for rank, result in enumerate(ranks):
        assert torch.equal(result["gathered"], torch.cat(x))
        assert torch.equal(result["sum"], sum(x))
        assert torch.equal(result["scattered"], rows[2 * rank : 2 * rank + 2])
        traffic = result["traffic"]
        assert traffic["features"].bytes_sent == (world_size - 1) * 6 * 4
        assert traffic["scalars"].bytes_sent == 2 * (world_size - 1) * 24 // world_size
        assert traffic["state"].bytes_sent == (world_size - 1) * 4 * 4
        assert all(counted.calls == 1 and counted.seconds > 0 for counted in traffic.values())


def gather_on_hosts(communicator: Communicator) -> list[Any]:
    """Gather a host tensor through a separate gloo group and through the default group."""
    separate = Communicator(host_group=dist.new_group(backend="gloo"))
    x = torch.tensor([communicator.rank])
    gathered = [ranks.begin_host_gather(x, "features").wait().tolist() for ranks in (separate, communicator)]
    return [*gathered, separate.gather_objects(communicator.rank), separate.on_rank_zero(lambda: 7)]


def test_host_tensors_are_gathered_through_either_kind_of_group() -> None:
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


def test_ranks_with_gpus_have_a_gloo_group_for_host_tensors_and_one_for_each_rank() -> None:
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
    assert subnormals_left(1) == 1
    with launch.process_group("task"):
        in_thread: list[int] = []
        thread = threading.Thread(target=lambda: in_thread.append(subnormals_left(1)))
        thread.start()
        thread.join()
        assert in_thread == [0]
        assert [subnormals_left(), subnormals_left(1)] == [0, 0]
    assert subnormals_left(1) == 1


def test_one_rank_sends_nothing() -> None:
    assert collect(Communicator())["traffic"] == {}


def test_an_error_of_rank_zero_reaches_all_ranks_with_its_message() -> None:
    """All ranks raise the error's class, or its nearest base class that they know and can construct."""
    disk_full = [f"{name}: the disk is full" for name in ("UserError", "SaveFailed", "DiskFull")]
    alone = [*disk_full, "KnownToRankZero: the disk is full", "MissingShards: 3 shards are missing"]
    assert fail(Communicator()) == [*alone, "UserError: no shard"]

    of_last_rank = f"UserError: rank 1 on {socket.gethostname()}: no shard"
    constructed = "UserError: 3 shards are missing"
    rank_0 = [*disk_full, "KnownToRankZero: the disk is full", constructed, of_last_rank]
    rank_1 = [*disk_full, "DiskFull: the disk is full", constructed, of_last_rank]
    assert run_ranks(2, fail) == [rank_0, rank_1]


def exchange(communicator: Communicator) -> list[Any]:
    """Gather and broadcast JSON whose size differs between ranks, then bytes from rank 1 that are not JSON."""
    rank = communicator.rank

    def message(sender: int) -> dict[str, Any]:
        return {"text": "\udcff é" * sender, "numbers": [sender, -0.1, float("inf"), 2**62], "none": None}

    gathered = communicator.gather_objects(message(rank))
    of_rank_zero = communicator.on_rank_zero(lambda: ["of", {"rank": rank}])
    with patch("json.dumps", lambda x: repr(pickle.dumps(x)) if rank == 1 else "{}"):
        refused = raised(lambda: communicator.gather_objects(Path()))
    return [gathered == [message(0), message(1)], of_rank_zero, refused]


def test_ranks_exchange_json_and_nothing_else() -> None:
    for all_arrived, of_rank_zero, refused in run_ranks(2, exchange):
        assert all_arrived
        assert of_rank_zero == ["of", {"rank": 0}]
        assert "Rank 1 sent bytes that are not JSON" in refused


class Found(NamedTuple):
    """A result of rank 0 with types that JSON does not have."""

    path: Path
    scores: Mapping[int, tuple[float, ...]]


def find(communicator: Communicator) -> list[Any]:
    """Receive values from rank 0, and a value that is not of the expected type."""
    found = communicator.value_from_rank_zero(Found | None, lambda: Found(Path("a\udcff"), {3: (0.1, math.inf)}))
    nothing = communicator.value_from_rank_zero(Found | None, lambda: None)
    with pytest.raises(ValidationError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        communicator.value_from_rank_zero(int, lambda: "three")
    with pytest.raises(UserError, match="no disk"):
        communicator.value_from_rank_zero(Found, Mock(side_effect=UserError("no disk")))
    return [found, nothing]


def test_values_from_rank_zero_keep_their_types() -> None:
    expected = [Found(Path("a\udcff"), {3: (0.1, math.inf)}), None]
    assert find(Communicator()) == expected
    assert run_ranks(2, find) == [expected, expected]


@pytest.mark.parametrize("value", [{"a": [{1}]}, Path("a"), torch.zeros(1), b"", SaveFailed("x")])
def test_objects_that_json_cannot_represent_are_refused_even_on_one_rank(value: Any) -> None:
    with pytest.raises(TypeError):
        Communicator().gather_objects(value)
    with pytest.raises(TypeError):
        Communicator().on_rank_zero(lambda: value)


def count(communicator: Communicator) -> list[int]:
    return [communicator.count("turns") for _ in range(3)]


def test_all_ranks_share_a_counter() -> None:
    assert count(Communicator()) == [1, 2, 3]
    first, second = run_ranks(2, count)
    assert sorted(first + second) == [1, 2, 3, 4, 5, 6]


def test_rows_that_the_number_of_ranks_does_not_divide_are_refused() -> None:
    communicator = Communicator()
    communicator.world_size = 2
    with pytest.raises(ValueError, match="3 rows are not divisible by 2 ranks"):
        communicator.reduce_scatter(torch.zeros(3, 1), "state")
