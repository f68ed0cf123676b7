"""Estimate the host memory of a run's loaders, and warn if this machine has too little memory."""

import os
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import torch

from neuclip_ds.data.loader import part_count
from neuclip_ds.planning.memory import MemoryAccount, MemoryQuery

SHARED_MEMORY = Path("/dev/shm")  # torch shares tensors between processes here
_PROCESS = 300_000_000  # per worker: 0.05 GB at first, 0.2 GB once garbage collection copies pages; 0.5 GB is inherited
FIX = "use a smaller data.micro_batch, model.activation_checkpointing=true, a higher ZeRO stage, or more ranks"
_FIX_OF_HOST = "use fewer data.workers or data.prefetch, a smaller data.batch_size, or more nodes"


class LoaderMemory(NamedTuple):
    """Peak memory, in bytes, of the loaders of all ranks on a node."""

    shared: int  # bytes in /dev/shm
    total: int
    ranks: int  # number of ranks on the node

    def describe(self) -> str:
        return f"node of {self.ranks}: {self.total / 1e9:,.1f} GB (in a container {self.advice})"

    @property
    def advice(self) -> str:
        """Container option that provides enough shared memory for a node's batches, rounded up to whole gigabytes."""
        return f"--shm-size={-(-self.shared // 10**9)}g"


def loader_memory(query: MemoryQuery, ranks: int) -> LoaderMemory:
    """Estimate the memory of the loaders on a node with `ranks` ranks.

    For training and concurrent evaluation, each worker keeps `data.prefetch` parts of batches in shared memory and
    builds one more. If a batch is one micro-batch, it is kept while the next batch is fetched; otherwise, its rows are
    freed during the second pass over the batch. With a GPU, pinned memory contains the parts that are ready or in use.
    """
    data, rows, micro, on_gpu = query.config.data, query.rank_batch, query.micro_batch, query.device == "cuda"
    pair = 3 * query.image_size**2 + 8 * query.tokenizer.context_length + 9
    sides = [rows, micro] if data.val or data.zero_shot or data.evaluation_sets else [rows]
    parts = sum(pair * -(-side // part_count(side, query.image_size)) for side in sides)  # one part of each loader
    ready, in_use = data.workers * data.prefetch * parts, pair * rows * (2 if rows == micro else 1)
    shared = ready + (in_use if data.workers and not on_gpu else 0)
    private = data.workers * (len(sides) * _PROCESS + parts)
    pinned = ready + in_use if on_gpu else 0
    return LoaderMemory(ranks * shared, ranks * (shared + private + pinned), ranks)


def local_ranks() -> int:
    """Return the number of launched ranks that run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)  # torchrun's, DeepSpeed's


def shortages(found: MemoryAccount, loaders: LoaderMemory, device: str) -> list[str]:
    """Return a warning for each kind of memory (GPU, RAM, shared memory) that is smaller than the estimate."""
    on_gpu = device == "cuda"
    machine = f"this machine for its {loaders.ranks} ranks" if loaders.ranks > 1 else "this machine"
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    of_machine = loaders.ranks * (found.on_host if on_gpu else found.peak) + loaders.total
    needs = [(of_machine, ram, machine, _FIX_OF_HOST if on_gpu else FIX)]
    if on_gpu:
        needs.append((found.peak, torch.cuda.get_device_properties(0).total_memory, "each rank's GPU", FIX))
    if SHARED_MEMORY.is_dir():  # some systems have it elsewhere
        fix = f"start the container with {loaders.advice}, or lower data.workers or data.prefetch"
        needs.append((loaders.shared, disk_usage(SHARED_MEMORY).free, str(SHARED_MEMORY), fix))
    return [
        f"The run needs {needed / 1e9:,.1f} GB (computed) of {what}, which has {there / 1e9:,.1f} GB: {fix}."
        for needed, there, what, fix in needs
        if needed > there
    ]
