"""Shared memory: whether the batches of the loaders fit, which are otherwise killed by SIGBUS."""

import os
from collections.abc import Iterator

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import read_environment
from neuclip_ds.doctor.finding import Finding, fine, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.planning.loader_memory import SHARED_MEMORY, loader_memory
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.planning.memory_check import local_ranks


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    loaders = loader_memory(MemoryQuery(request.config, read_environment().world_size), local_ranks())
    free, needed = free_bytes(), loaders.shared_of_node
    batch = f"batches of {request.config.data.batch_size} pairs"
    there = f"{SHARED_MEMORY} has {free / 1e9:,.2f} GB free; the loaders of {batch} need {needed / 1e9:,.2f} GB"
    if needed > free:
        yield wrong(
            f"{there} (computed) and are killed by SIGBUS.",
            f"Start the container with {loaders.advice}, or lower data.workers or data.prefetch.",
        )
    else:
        yield fine(f"{there}.")


def free_bytes() -> int:
    """Return the free bytes of this node's shared memory."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize
