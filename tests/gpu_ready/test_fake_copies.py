"""Check which copies to the device the host waits for."""

import torch
from fake_cuda import DEVICE, fake_cuda

from neuclip_ds.distributed.communicator import to_device


def test_only_large_tensors_of_the_host_are_pinned() -> None:
    large = torch.zeros(16_384, dtype=torch.int64)  # 128 KB: the host waits for the copy unless it is pinned
    small = torch.zeros(8)
    with fake_cuda() as gpu:
        assert {to_device(x, DEVICE).device for x in (large, small)} == {DEVICE}
        assert not gpu.syncs
        large.to(DEVICE, non_blocking=True)
        assert gpu.syncs.total() == 1, "the fake device tells the difference"
        assert to_device(large, torch.device("cpu")) is large
        on_device = torch.zeros(len(large), device=DEVICE)
        assert to_device(on_device, DEVICE) is on_device
        gpu.syncs.clear()
        to_device(on_device, torch.device("cpu"))
        assert gpu.syncs.total() == 1, "the host does not read a copy before it has arrived"
