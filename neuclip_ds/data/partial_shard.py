"""A shard that is fetched in pieces, so that samples can be read before the whole shard has arrived.

Its folder in the cache (neuclip_ds/data/cache.py) contains:

    data      the bytes of the shard; bytes that have not arrived are holes
    arrived   one byte per block of 4,096 bytes; it is 1 once the block is in `data`
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

BLOCK = 4096  # bytes
DATA = "data"
ARRIVED = "arrived"

Range = tuple[int, int]  # the bytes start ... end - 1 of a shard


class PartialShard:
    """A shard of `size` bytes that one process fetches in pieces; its methods may be called from any thread.

    A range must be claimed before it is requested. Each block is claimed only once, so no block is fetched twice.

    Args:
        folder: an existing, empty folder.
        lock: the shard's lock in the cache, which this process holds.
    """

    def __init__(self, url: str, size: int, folder: Path, lock: FileLock) -> None:
        self.url = url
        self.size = size
        self.folder = folder
        self.lock = lock
        blocks = -(-size // BLOCK)
        self._claimed = np.zeros(blocks, dtype=bool)
        self._missing_blocks = blocks
        self._mutex = threading.Lock()
        for name, length in ((DATA, size), (ARRIVED, blocks)):  # in this order: a reader opens `arrived` first
            with (folder / name).open("wb") as file:
                file.truncate(length)

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self._missing_blocks == 0

    def claim(self, start: int, end: int) -> list[Range]:
        """Claim the blocks that contain the bytes start ... end - 1; return the ranges that were still unclaimed."""
        first = start // BLOCK
        stop = -(-end // BLOCK)
        with self._mutex:
            runs = _runs(~self._claimed[first:stop])
            self._claimed[first:stop] = True
        return [self._to_range(first + run_start, first + run_end) for run_start, run_end in runs]

    def claim_next(self, count: int, most_bytes: int) -> list[Range]:
        """Claim the first unclaimed bytes of the shard, as up to `count` ranges, and return these ranges.

        Each range has at most `most_bytes` bytes, but at least one block. Returns an empty list once everything is
        claimed, even if some of it has not arrived yet.
        """
        most_blocks = max(1, most_bytes // BLOCK)
        ranges: list[Range] = []
        with self._mutex:
            for run_start, run_end in _runs(~self._claimed):
                for first in range(run_start, run_end, most_blocks):
                    if len(ranges) == count:
                        return ranges
                    stop = min(first + most_blocks, run_end)
                    self._claimed[first:stop] = True
                    ranges.append(self._to_range(first, stop))
        return ranges

    def write(self, start: int, data: bytes) -> None:
        """Store the bytes of a claimed range; raise OSError if they cannot be written."""
        first = start // BLOCK
        blocks = -(-len(data) // BLOCK)
        with (self.folder / DATA).open("r+b", buffering=0) as file:
            _write_at(file.fileno(), data, start)
        with (self.folder / ARRIVED).open("r+b", buffering=0) as file:  # only now may readers read the blocks
            _write_at(file.fileno(), b"\1" * blocks, first)
        with self._mutex:
            self._missing_blocks -= blocks

    def _to_range(self, first_block: int, end_block: int) -> Range:
        return first_block * BLOCK, min(end_block * BLOCK, self.size)


def _write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset; on a disk that is nearly full, `os.pwrite` may write only some of them."""
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(fd, remaining, offset)
        remaining = remaining[written:]
        offset += written


def has_arrived(arrived: int, extents: Iterable[tuple[int, int]]) -> bool:
    """Return whether all bytes of the extents (offset, size) are present, according to the open file `arrived`."""
    for offset, size in extents:
        first = offset // BLOCK
        blocks = -(-(offset + size) // BLOCK) - first
        if os.pread(arrived, blocks, first) != b"\1" * blocks:
            return False
    return True


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the start and the end of each run of true values."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    starts = edges[0::2].tolist()
    ends = edges[1::2].tolist()
    return list(zip(starts, ends, strict=True))
