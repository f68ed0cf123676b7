"""Partitions of rows into one contiguous range per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Partition(NamedTuple):
    """One rank's rows [start, stop). Rank r of K gets [r * ceil(rows/K), (r+1) * ceil(rows/K)), clipped to `rows`."""

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
    """This rank's rows of a partitioned table; each tensor has the shape (partition.size, ...).

    If `per_sample` is set, `SampleStore` restores the rows after a skipped step. If several ranks store the same rows,
    `saved` is set on only one of these ranks.
    """

    partition: Partition
    tensors: Mapping[str, Tensor]
    per_sample: bool = False
    saved: bool = True
