"""Partition rows contiguously over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Partition(NamedTuple):
    """Rows [start, stop) of `rows`: rank r of K has [r * ceil(rows/K), (r+1) * ceil(rows/K)), clipped to `rows`."""

    rows: int
    start: int
    stop: int

    @classmethod
    def of(cls, rows: int, rank: int, world_size: int) -> Partition:
        """Return a rank's partition."""
        share = -(-rows // world_size)
        return cls(rows, min(rank * share, rows), min((rank + 1) * share, rows))

    @property
    def size(self) -> int:
        """Number of local rows."""
        return self.stop - self.start


class RowTable(NamedTuple):
    """This rank's rows of a partitioned table: each tensor is (partition.size, ...).

    Rows `per_sample` are those of a store that restores them by itself after a skipped step. Where several ranks hold
    the same rows, one of them has it `saved`.
    """

    partition: Partition
    tensors: Mapping[str, Tensor]
    per_sample: bool = False
    saved: bool = True
