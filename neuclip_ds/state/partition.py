"""Partitions of rows into one contiguous range per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
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
        rows_per_rank = -(-rows // world_size)  # rounded up
        start = min(rank * rows_per_rank, rows)
        stop = min((rank + 1) * rows_per_rank, rows)
        return cls(rows, start, stop)

    @property
    def size(self) -> int:
        """Number of local rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class RowTable:
    """This rank's rows of a partitioned table; each tensor has the shape (partition.size, ...).

    If `per_sample` is set, `SampleStore` restores the rows after a skipped step. If several ranks store the same rows,
    `saved` is set on only one of these ranks.
    """

    partition: Partition
    tensors: Mapping[str, Tensor]
    _: KW_ONLY
    per_sample: bool = False
    saved: bool = True
