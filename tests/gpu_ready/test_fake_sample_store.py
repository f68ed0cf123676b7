"""Check when large copies to the device and the per-sample store wait, with the table on the device or the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build import columns
from fake_cuda import DEVICE, RANKS, GpuRank, fake_cuda

from neuclip_ds.distributed.communicator import to_device
from neuclip_ds.losses import sample_store
from neuclip_ds.losses.sample_store import MAX_DEVICE_BYTES, SampleStore

SAMPLES, ROWS = 20_000, 16_384  # 128 KB of int64 indices: the host waits for their copy unless they are pinned
FIELDS = {"tau_image": 0.07, "tau_text": 0.07, "visits": 0.0}


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("world_size", RANKS)
def test_a_visit(place: str, world_size: int) -> None:
    """Read this rank's rows, all ranks' rows and the local rows, then write; the host never waits."""
    limit = MAX_DEVICE_BYTES if place == "device" else 0
    with fake_cuda() as gpu:
        store = SampleStore(SAMPLES, FIELDS, GpuRank(world_size), max_device_bytes=limit)
        index = torch.arange(world_size * ROWS)
        values = torch.empty(len(index), len(FIELDS), device=DEVICE)
        for _ in range(2):
            torch.zeros(1, device=DEVICE)  # the towers' work between two visits
            gpu.syncs.clear()
            own = store.begin_read(index).wait()
            every = store.begin_read_all(index, count=2).wait()
            local = store.local_rows(index)
            store.write(index, values)
        assert not gpu.syncs
        store.undo()
    assert [tuple(x.shape) for x in (own, every, local)] == [(ROWS, 3), (len(index), 2), (len(index), 3)]
    assert {x.device for x in (own, every, local)} == {DEVICE}


def test_values_for_a_table_on_the_host_count_once_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in host memory has real values; the test supplies the values that the fake device sends."""
    arrived: list[str] = []

    class Given:
        def __init__(self, values: torch.Tensor) -> None:
            assert values.device == DEVICE

        def wait(self) -> torch.Tensor:
            arrived.append("waited")
            return torch.tensor([[1.0, 2, 3], [4, 5, 6]])

    monkeypatch.setattr(sample_store, "HostCopy", Given)
    index = torch.tensor([7, 2])

    def stored(store: SampleStore) -> list[Any]:
        return columns(store.rows())["tau_image"][index].tolist()

    with fake_cuda():
        store = SampleStore(10, FIELDS, GpuRank(1), max_device_bytes=0)
        store.write(index, torch.empty(2, 3, device=DEVICE))
        assert arrived == []
        store.begin_read(index)
        assert arrived == ["waited"]
        assert stored(store) == [1, 4]
        store.write(index, torch.empty(2, 3, device=DEVICE))
        store.write(index, torch.empty(2, 3, device=DEVICE))
        assert arrived == ["waited"] * 2
        store.undo()
        assert stored(store) == [1, 4]
        store.write(index.flip(0), torch.empty(2, 3, device=DEVICE))
        assert stored(store) == [4, 1]
        store.undo()
        assert stored(store) == [1, 4]


def test_only_large_tensors_of_the_host_are_pinned() -> None:
    large, small = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(8)
    with fake_cuda() as gpu:
        assert {to_device(x, DEVICE).device for x in (large, small)} == {DEVICE}
        assert not gpu.syncs
        large.to(DEVICE, non_blocking=True)
        assert gpu.syncs.total() == 1, "the fake device tells the difference"
        assert to_device(large, torch.device("cpu")) is large
        there = torch.zeros(ROWS, device=DEVICE)
        assert to_device(there, DEVICE) is there
        gpu.syncs.clear()
        to_device(there, torch.device("cpu"))
        assert gpu.syncs.total() == 1, "the host does not read a copy before it has arrived"
