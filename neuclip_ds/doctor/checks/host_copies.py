"""Bandwidth between a GPU and the host's pinned memory, over which batches and offloaded state go."""

from collections.abc import Iterator
from functools import partial

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, warning
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.timing import seconds_of

_BYTES = 512 << 20
_SLOW = 6.0  # GB/s: half of what 16 lanes of PCIe 3 carry


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    device = communicator.device
    if device.type == "cpu":
        return
    here = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    pairs = {"host to device, GB/s": (there, here), "device to host, GB/s": (here, there)}
    rates = {
        name: _BYTES / seconds_of(partial(to.copy_, of, non_blocking=True), device) / 1e9
        for name, (to, of) in pairs.items()
    }
    yield fine(figures=rates)
    for name, rate in rates.items():
        if rate < _SLOW:
            yield warning(
                f"The GPU's {name.partition(',')[0]} copies reach {rate:.1f} GB/s.",
                "See the link in `nvidia-smi -q -d PCIE`; bind ranks to the cores near their GPU "
                "(`nvidia-smi topo -m`).",
            )
