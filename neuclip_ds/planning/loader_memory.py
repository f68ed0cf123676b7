"""The host memory of a rank's loader processes, and the shared memory through which they hand over batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neuclip_ds.planning.memory import MemoryQuery

SHARED_MEMORY = Path("/dev/shm")  # where torch puts tensors that go from one process to another
_IN_USE = 2  # batches that the training process holds while it takes the next one
_PROCESS = 300_000_000  # measured: 0.05 GB at first, 0.2 once garbage collection has copied pages; 0.5 are inherited


@dataclass(frozen=True)
class LoaderMemory:
    """Bytes of one rank at their peak, and the number of ranks of a node."""

    shared: int  # in /dev/shm: batches that are ready or in use, of training and of an evaluation meanwhile
    private: int  # of the loader processes, with the batches that they are building
    processes: int
    ranks_of_node: int

    @property
    def of_node(self) -> int:
        """Bytes of all ranks of a node."""
        return self.ranks_of_node * (self.shared + self.private)

    @property
    def shared_of_node(self) -> int:
        """Bytes in /dev/shm of a node."""
        return self.ranks_of_node * self.shared

    @property
    def advice(self) -> str:
        """Return the option of a container with room for a node's batches, in whole gigabytes."""
        return f"--shm-size={-(-self.shared_of_node // 10**9)}g"

    def line(self) -> str:
        """Return what a rank and a node need."""
        if not self.processes:
            return "none, batches are loaded in the training process (data.workers=0)"
        rank = f"{self.shared / 1e9:,.2f} GB in {SHARED_MEMORY} and {self.private / 1e9:,.2f} GB in {self.processes}"
        node = f"node of {self.ranks_of_node}: {self.of_node / 1e9:,.1f} GB"
        return f"{rank} processes of each rank, {node} (in a container {self.advice})"


def loader_memory(query: MemoryQuery, ranks_of_node: int) -> LoaderMemory:
    """Compute the loaders' memory of a run.

    A worker prepares `data.prefetch` batches ahead. The training loader keeps its batches while an evaluation, whose
    loader prepares as many, goes through held-out data.
    """
    data = query.config.data
    image, tokens = 3 * query.source.preprocessing.size**2, 8 * query.tokenizer.context_length
    batch = query.config.rank_batch(query.world_size) * (image + tokens + 8 + 1)  # pixels, tokens, index, validity
    loaders = 2 if data.val or data.zero_shot or data.evaluation_sets else 1
    processes = loaders * data.workers
    ready = loaders * data.workers * data.prefetch + _IN_USE if data.workers else 0
    return LoaderMemory(ready * batch, processes * (_PROCESS + batch), processes, ranks_of_node)
