"""Size of a rank's memory, and the speed of a copy within it: each byte is read once and written once."""

import os
from collections.abc import Iterator

import torch

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.timing import seconds_of
from neuclip_ds.planning.memory_check import local_ranks

MEMORY, SIZE = "memory, GB/s", "memory of a rank, GB"
_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far beyond the caches


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    device = communicator.device
    source = torch.zeros(_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device)
    yield fine(figures={MEMORY: 2 * source.numel() / seconds / 1e9, SIZE: size(device) / 1e9})


def size(device: torch.device) -> float:
    """Return the bytes of memory that a rank has: its GPU's, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_ranks()
