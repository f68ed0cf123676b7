"""The host memory of a rank's loaders: shared memory, pinned memory, and that of the loader processes.

Loader processes hand over parts of batches through shared memory. With a GPU the training process copies each part to
pinned memory at once, and keeps a batch there until the last of its micro-batches has gone to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neuclip_ds.data.rank_batch import part_count
from neuclip_ds.planning.memory import MemoryQuery

SHARED_MEMORY = Path("/dev/shm")  # where torch puts tensors that go from one process to another
_PROCESS = 300_000_000  # measured: 0.05 GB at first, 0.2 once garbage collection has copied pages; 0.5 are inherited


@dataclass(frozen=True)
class LoaderMemory:
    """Bytes of one rank at their peak, and the number of ranks of a node."""

    shared: int  # in /dev/shm: what is ready, of training and of an evaluation meanwhile; on a CPU also what is in use
    private: int  # of the loader processes, with what they are building
    processes: int
    ranks_of_node: int
    pinned: int = 0  # what is ready or in use, on its way to a GPU
    ahead: float = 1.0  # batches that are loaded while a step runs, at most

    @property
    def of_node(self) -> int:
        """Bytes of all ranks of a node."""
        return self.ranks_of_node * (self.shared + self.private + self.pinned)

    @property
    def shared_of_node(self) -> int:
        """Bytes in /dev/shm of a node."""
        return self.ranks_of_node * self.shared

    @property
    def advice(self) -> str:
        """Return the option of a container with room for a node's batches, in whole gigabytes."""
        return f"--shm-size={-(-self.shared_of_node // 10**9)}g"

    def lines(self) -> list[str]:
        """Return what a rank and a node need."""
        node = f"node of {self.ranks_of_node}: {self.of_node / 1e9:,.1f} GB"
        pinned = f"{self.pinned / 1e9:,.2f} GB of pinned memory" if self.pinned else ""
        if not self.processes:
            rank = f"{pinned} of each rank, {node}" if pinned else "none"
            return [f"{rank}, batches are loaded in the training process (data.workers=0)"]
        parts = [f"{self.shared / 1e9:,.2f} GB in {SHARED_MEMORY}", pinned, f"{self.private / 1e9:,.2f} GB in"]
        rank = ", ".join(part for part in parts if part)
        found = [f"{rank} {self.processes} processes of each rank, {node} (in a container {self.advice})"]
        if self.ahead < 1:
            found.append(f"at most {self.ahead:.0%} of a batch is loaded while a step runs; data.prefetch raises it")
        return found


def loader_memory(query: MemoryQuery, ranks_of_node: int) -> LoaderMemory:
    """Compute the loaders' memory of a run.

    A worker prepares `data.prefetch` parts of batches ahead. The training loader keeps its parts while an evaluation,
    whose loader prepares as many, goes through held-out data.
    """
    data, rows, micro = query.config.data, query.rank_batch, query.micro_batch
    ahead = data.workers * data.prefetch
    training, count = _largest_part(query, rows), part_count(rows, query.image_size)
    evaluates = data.val or data.zero_shot or data.evaluation_sets
    evaluation = _largest_part(query, micro) if evaluates else _Part(0, 0)
    # one pass takes the next batch while it still holds its own; the second of two passes frees what it has used
    in_use = count * (2 if rows == micro else 1)
    ready = ahead * (training.size + evaluation.size) if data.workers else 0
    processes = (2 if evaluates else 1) * data.workers
    on_gpu = query.device == "cuda"
    pinned = (ahead + in_use) * training.pinned + ahead * evaluation.pinned
    building = data.workers * (training.size + evaluation.size)
    return LoaderMemory(
        shared=ready + (in_use * training.size if data.workers and not on_gpu else 0),
        private=processes * _PROCESS + building,
        processes=processes,
        ranks_of_node=ranks_of_node,
        pinned=pinned if on_gpu else 0,
        ahead=ahead / count if data.workers else 1.0,
    )


@dataclass(frozen=True)
class _Part:
    """Bytes of a part of a batch."""

    size: int
    pinned: int


def _largest_part(query: MemoryQuery, rows: int) -> _Part:
    """Return the largest of the parts of so many rows."""
    part = -(-rows // part_count(rows, query.image_size))
    pixels, others = 3 * query.image_size**2 * part, (8 * query.tokenizer.context_length + 8 + 1) * part
    # torch rounds a block up to a power of two; of tokens, indices and validity that is little
    return _Part(pixels + others, (1 << (pixels - 1).bit_length()) + others)
