"""Large copies to the device come from pinned memory, so that the host does not wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import DEVICE, GpuRank, fake_cuda
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.distributed.host_copies import to_device
from neuclip_ds.evaluation.encoding import encoder_of
from neuclip_ds.objectives.gather import Features, GatheredFeatures
from neuclip_ds.state.sample_store import SampleStore

ROWS = 16384  # int64 indices of 128 KB
FIELDS = {"image": 0.0, "text": 0.0, "visits": 0.0}


class Copies(TorchDispatchMode):
    """Notes the bytes of copies from the host to the device, by whether `pin_memory` returned their source."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[int] = []
        self.pageable: list[int] = []
        self.sources: list[Tensor] = []  # in pinned memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and result.device.type == "cuda":
            (self.pinned if any(args[0] is x for x in self.sources) else self.pageable).append(args[0].nbytes)
        return result


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    found = Copies()

    def pin(tensor: Tensor) -> Tensor:
        found.sources.append(tensor.clone())
        return found.sources[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    with fake_cuda(), found:
        yield found


def test_only_large_tensors_of_the_host_are_pinned(copies: Copies) -> None:
    large, small = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(8)
    assert {to_device(x, DEVICE).device for x in (large, small)} == {DEVICE}
    assert (copies.pinned, copies.pageable) == ([large.nbytes], [small.nbytes])
    assert to_device(large, torch.device("cpu")) is large
    there = torch.zeros(ROWS, device=DEVICE)
    assert to_device(there, DEVICE) is there
    assert len(copies.sources) == 1


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_the_store_of_samples(copies: Copies, limit: int) -> None:
    """Indices where the table is on the device; rows of a table on the host, and the places of what is written."""
    store = SampleStore(2 * ROWS, FIELDS, GpuRank(1), max_device_bytes=limit)
    index = torch.arange(ROWS)
    store.begin_read(index).wait()
    store.begin_read_all(index, count=2).wait()
    store.local_rows(index)
    store.write(index, torch.empty(ROWS, len(FIELDS), device=DEVICE))
    assert len(copies.pinned) == 4
    assert max(copies.pageable, default=0) < 1 << 16


def test_the_rows_of_a_batch_that_count(copies: Copies) -> None:
    index, valid = torch.arange(ROWS), torch.arange(ROWS) > 0
    image, text = (torch.empty(ROWS, 4, device=DEVICE) for _ in range(2))
    GatheredFeatures(Features(image, text, index, valid), GpuRank(1), torch.float32)
    assert (len(copies.pinned), copies.pageable) == (2, [])


def test_images_to_evaluate(copies: Copies) -> None:
    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
            return inputs

    image, tokens = encoder_of(Model(), DEVICE)(torch.zeros(8, 3, 64, 64), None)
    assert tokens is None and image is not None
    assert (len(copies.pinned), copies.pageable) == (1, [])
