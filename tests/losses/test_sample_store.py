"""Each rank reads its samples, whichever rank stores them, and neither reads nor writes make the host wait."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from build import columns
from fake_cuda import DEVICE, RANKS, GpuRank, fake_cuda
from ranks import run_ranks
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import sample_store
from neuclip_ds.losses.sample_store import MAX_DEVICE_BYTES, SampleStore

FIELDS = {"log_u_image": -math.inf, "log_u_text": -math.inf}
FIELD_NAMES = "log_u_image,log_u_text"


def read_write_read(communicator: Communicator) -> dict[str, Any]:
    """Write values 0 to 7 for four rows, one of which is empty, and read them in reverse order."""
    store = SampleStore(10, FIELDS, communicator)
    index = torch.tensor([7, 0, -1, 9])  # -1: an empty row
    before = store.begin_read(index).wait()
    store.write(index, torch.arange(8.0).reshape(4, 2))
    return {
        "before": before,
        "after": store.begin_read(index.flip(0)).wait(),
        "rows": store.rows(),
        "bytes": communicator.traffic["state"].bytes_sent,
    }


READ = torch.tensor([[6.0, 7], [0, 0], [2, 3], [0, 1]])  # by `read_write_read`


def test_two_ranks_read_what_was_written() -> None:
    first, second = run_ranks(2, read_write_read)
    assert torch.isneginf(first["before"]).all()
    assert torch.isneginf(second["before"][1]).all()
    assert torch.equal(second["before"][0], torch.zeros(2)), "an empty row reads zeros"
    assert torch.equal(torch.cat([first["after"], second["after"]]), READ)
    first_rows = first["rows"].tensors[FIELD_NAMES]
    second_rows = second["rows"].tensors[FIELD_NAMES]
    assert first_rows.shape == second_rows.shape == (5, 2)
    assert first_rows[0].tolist() == [2, 3]
    assert second_rows[2:, 0].tolist() == [0, -math.inf, 6]
    assert torch.isneginf(torch.cat([first_rows[1:], second_rows[:2]])).all()
    assert first["bytes"] == 2 * 2 * 2 * 4  # two reads of (B/K, f) float32


def test_one_rank_needs_no_process_group() -> None:
    assert torch.equal(read_write_read(Communicator())["after"], READ)


def test_the_last_of_repeated_rows_is_stored_and_can_be_undone() -> None:
    store = SampleStore(10, FIELDS, Communicator())
    index = torch.tensor([7, 2, 7, -1, 2])
    store.write(index, torch.arange(10.0).reshape(5, 2))
    assert columns(store.rows())["log_u_image"][[7, 2]].tolist() == [4, 8]
    store.write(index.flip(0), torch.arange(10.0).reshape(5, 2))
    assert columns(store.rows())["log_u_image"][[7, 2]].tolist() == [8, 6]
    store.undo()
    assert columns(store.rows())["log_u_image"][[7, 2]].tolist() == [4, 8]
    assert torch.isneginf(columns(store.rows())["log_u_image"][[0, 1, 3, 4, 5, 6, 8, 9]]).all()


@pytest.mark.parametrize("table", ["device", "host"])
@pytest.mark.parametrize("world_size", RANKS)
def test_a_gpu_is_never_waited_for(table: str, world_size: int) -> None:
    """Read this rank's rows, all ranks' rows and the local rows, then write."""
    rows = 16_384  # 128 KB of int64 indices: the host waits for their copy unless they are pinned
    fields = {"tau_image": 0.07, "tau_text": 0.07, "visits": 0.0}
    max_device_bytes = MAX_DEVICE_BYTES if table == "device" else 0
    with fake_cuda() as gpu:
        store = SampleStore(20_000, fields, GpuRank(world_size), max_device_bytes=max_device_bytes)
        index = torch.arange(world_size * rows)
        values = torch.empty(len(index), len(fields), device=DEVICE)
        for _ in range(2):
            torch.zeros(1, device=DEVICE)  # the towers' work between two steps
            gpu.syncs.clear()
            own_rows = store.begin_read(index).wait()
            all_rows = store.begin_read_all(index, count=2).wait()
            stored_rows = store.local_rows(index)
            store.write(index, values)
        assert not gpu.syncs
        store.undo()
    assert own_rows.shape == (rows, 3)
    assert all_rows.shape == (len(index), 2)
    assert stored_rows.shape == (len(index), 3)
    assert {x.device for x in (own_rows, all_rows, stored_rows)} == {DEVICE}


def test_values_for_a_table_in_host_memory_are_stored_once_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in host memory has real values; the test supplies the values that the fake device sends."""
    waits: list[str] = []

    class ArrivingValues:
        def __init__(self, values: Tensor) -> None:
            assert values.device == DEVICE

        def wait(self) -> Tensor:
            waits.append("waited")
            return torch.tensor([[1.0, 2], [4, 5]])

    monkeypatch.setattr(sample_store, "HostCopy", ArrivingValues)
    index = torch.tensor([7, 2])

    def stored(store: SampleStore) -> list[float]:
        return columns(store.rows())["log_u_image"][index].tolist()

    with fake_cuda():
        store = SampleStore(10, FIELDS, GpuRank(1), max_device_bytes=0)
        values = torch.empty(2, 2, device=DEVICE)
        store.write(index, values)
        assert waits == []
        store.begin_read(index)
        assert waits == ["waited"]
        assert stored(store) == [1, 4]
        store.write(index, values)
        store.write(index, values)
        assert waits == ["waited"] * 2
        store.undo()
        assert stored(store) == [1, 4]
        store.write(index.flip(0), values)
        assert stored(store) == [4, 1]
        store.undo()
        assert stored(store) == [1, 4]


@pytest.mark.gpu
def test_a_table_in_host_memory_equals_one_on_the_device(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU")
    communicator = Communicator("cuda")
    in_host_memory = SampleStore(10, FIELDS, communicator, max_device_bytes=0)
    on_device = SampleStore(10, FIELDS, communicator)
    for number in range(3):
        index = torch.tensor([7, number, -1, 7])
        for store in (in_host_memory, on_device):
            store.write(index, torch.rand(4, 2, generator=torch.Generator().manual_seed(number)).cuda())
            if number == 1:
                store.undo()
        assert torch.equal(in_host_memory.begin_read(index).wait(), on_device.begin_read(index).wait())
        for name, column in columns(in_host_memory.rows()).items():
            assert torch.equal(column.cpu(), columns(on_device.rows())[name].cpu())
