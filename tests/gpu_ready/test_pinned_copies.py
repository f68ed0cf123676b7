"""Large copies to the device come from pinned memory, so that the host does not wait for them."""

from __future__ import annotations

import torch
from fake_cuda import DEVICE, GpuRank, fake_cuda
from torch import Tensor

from neuclip_ds.distributed.communicator import to_device
from neuclip_ds.evaluation.encoding import encoder_of
from neuclip_ds.objectives.gather import Features, GatheredFeatures

ROWS = 16384  # int64 indices of 128 KB


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


def test_the_rows_of_a_batch_that_count() -> None:
    index, valid = torch.arange(ROWS), torch.arange(ROWS) > 0
    with fake_cuda() as gpu:
        image, text = torch.empty(2, ROWS, 4, device=DEVICE)
        GatheredFeatures(Features(image, text, index, valid), GpuRank(1), torch.float32)
    assert not gpu.syncs


def test_images_to_evaluate() -> None:
    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
            return inputs

    with fake_cuda() as gpu:
        image, tokens = encoder_of(Model(), DEVICE)(torch.zeros(8, 3, 64, 64), None)
    assert tokens is None and image is not None
    assert not gpu.syncs
