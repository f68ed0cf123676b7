"""Estimate the host memory of a run's loaders, and warn if this machine has too little memory."""

import os
from collections.abc import Iterable
from shutil import disk_usage
from typing import NamedTuple

import torch

from neuclip_ds.data.feature_table import FeatureTable
from neuclip_ds.data.loader import part_count, parts_of_rows
from neuclip_ds.data.stored_towers import IMAGE
from neuclip_ds.errors import counted
from neuclip_ds.limits import SHARED_MEMORY
from neuclip_ds.planning.memory import MemoryAccount, MemoryQuery

# A worker's own memory, rounded up: 0.05 GB at first, and 0.2 GB once garbage collection has copied pages. The 0.5 GB
# that it shares with its parent process are not counted.
_PROCESS_BYTES = 300_000_000
FIX_AT_ANY_STAGE = "use a smaller data.micro_batch, model.activation_checkpointing=true, or more ranks"
_FIX_OF_GPU = "use a smaller data.micro_batch, model.activation_checkpointing=true, a higher ZeRO stage, or more GPUs"
_FIX_OF_CPU = "use a smaller data.micro_batch, model.activation_checkpointing=true, fewer data.workers, or more nodes"
_FIX_OF_HOST = "lower data.workers, data.prefetch or data.batch_size, omit optimizer offload, or use more nodes"


class LoaderMemory(NamedTuple):
    """Peak memory, in bytes, of the loaders of all ranks on a node."""

    shared: int  # bytes in /dev/shm
    total: int
    ranks: int  # number of ranks on the node

    def describe(self) -> str:
        return f"{self.total / 1e9:,.1f} GB per node of {counted(self.ranks, 'rank')} (in a container: {self.advice})"

    @property
    def advice(self) -> str:
        """Container option that provides enough shared memory for a node's batches, rounded up to whole gigabytes."""
        return f"--shm-size={-(-self.shared // 10**9)}g"


def stored_bytes(tables: Iterable[FeatureTable]) -> int:
    """Return the bytes of a pair's stored features in all tables together."""
    total = 0
    for table in tables:
        total += table.dtype.itemsize * ((table.image_width or 0) + (table.text_width or 0))
    return total


def loader_memory(query: MemoryQuery, ranks: int, stored_bytes: int = 0) -> LoaderMemory:
    """Estimate the memory of the loaders on a node with `ranks` ranks.

    For training and concurrent evaluation, each worker keeps `data.prefetch` parts of batches in shared memory and
    builds one more. If a batch is one micro-batch, it is kept while the next batch is fetched; otherwise, its rows are
    freed during the second pass over the batch. With a GPU, pinned memory contains the parts that are ready or in use.
    Training also loads `stored_bytes` of features for each pair, and makes another copy to join the features of a
    batch's parts. Stored outputs of frozen trunks are not part of `stored_bytes`: they take the place of pixels or
    tokens.
    """
    data = query.config.data
    on_gpu = query.device == "cuda"
    training_pair_bytes = query.pair_bytes + 9 + stored_bytes
    training_parts = part_count(query.rank_batch, query.image_size)
    if IMAGE in query.trunk_widths:  # no pixels are loaded
        training_parts = parts_of_rows(query.rank_batch, query.pair_bytes)
    loaders = [(query.rank_batch, training_pair_bytes, training_parts)]
    if data.val or data.zero_shot or data.evaluation_sets:
        pair_bytes = 3 * query.image_size**2 + 8 * query.tokenizer.context_length + 9
        loaders.append((query.micro_batch, pair_bytes, part_count(query.micro_batch, query.image_size)))
    part_bytes = 0  # one part of a batch from each loader
    for batch_size, bytes_of_pair, parts in loaders:
        part_bytes += bytes_of_pair * -(-batch_size // parts)
    ready = data.workers * data.prefetch * part_bytes
    batches_in_use = 2 if query.rank_batch == query.micro_batch else 1
    in_use = training_pair_bytes * query.rank_batch * batches_in_use
    joined = 2 * stored_bytes * query.rank_batch  # of the batch in use and of the next one
    shared = ready
    if data.workers and not on_gpu:
        shared += in_use
    private = data.workers * (len(loaders) * _PROCESS_BYTES + part_bytes) + joined
    pinned = ready + in_use + joined if on_gpu else 0
    return LoaderMemory(ranks * shared, ranks * (shared + private + pinned), ranks)


def shortages(estimate: MemoryAccount, loaders: LoaderMemory, device: str) -> list[str]:
    """Return a warning for each kind of memory (GPU, RAM, shared memory) that is smaller than the estimate."""
    on_gpu = device == "cuda"
    machine = f"this machine with {loaders.ranks} ranks" if loaders.ranks > 1 else "this machine"
    rank_bytes = estimate.on_host if on_gpu else estimate.peak
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    warnings = _shortage(
        loaders.ranks * rank_bytes + loaders.total, ram, machine, _FIX_OF_HOST if on_gpu else _FIX_OF_CPU
    )
    if on_gpu:
        gpu = torch.cuda.get_device_properties(0).total_memory
        warnings += _shortage(estimate.peak, gpu, "the GPU of each rank", _FIX_OF_GPU)
    if SHARED_MEMORY.is_dir():  # some systems have it elsewhere
        fix = f"start the container with {loaders.advice}, or lower data.workers or data.prefetch"
        warnings += _shortage(loaders.shared, disk_usage(SHARED_MEMORY).free, str(SHARED_MEMORY), fix, free=True)
    return warnings


def _shortage(needed: int, available: int, memory: str, fix: str, free: bool = False) -> list[str]:
    """Return a list with a warning if `memory` has fewer available bytes than needed, else an empty list.

    `free` is whether `available` excludes bytes that are in use.
    """
    if needed <= available:
        return []
    size = f"{available / 1e9:,.2f} GB{' free' if free else ''}"
    return [f"The run needs {needed / 1e9:,.2f} GB (computed), but {memory} has {size}: {fix}."]
