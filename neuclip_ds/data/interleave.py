"""Choose how batches interleave shards: few enough shards at a time for a node's cache, many enough to mix well.

A batch takes equally many samples from each of S streams, and each stream is shuffled in blocks, so S blocks are in use
at a time: a window of S x block samples. The cache must hold all shards of the window; 8 million samples of 45 kB take
400 GB.
"""

from typing import NamedTuple

from neuclip_ds.errors import UserError

WINDOWS = (8_000_000, 4_000_000, 2_000_000)  # samples that are shuffled together, the best first
_PER_NODE = 250_000  # samples of a larger window on many nodes
_STREAMS = 64
_FULL = 0.8  # share of a cache that may be planned for
_AHEAD = 2  # streams whose next block is there before it is used
_SMALLEST_BLOCK = 100


class Interleave(NamedTuple):
    """How the order of samples interleaves shards."""

    streams: int  # S, a divisor of the global batch
    block: int  # positions of a stream that are shuffled together


class DataSize(NamedTuple):
    """The extent of a data set, all shards being alike."""

    samples: int
    shards: int
    bytes: int

    def resident_bytes(self, interleave: Interleave, nodes: int = 1) -> int:
        """Return the bytes of the shards that a node needs at a time, those of the next blocks included.

        A node reads its share of the streams, at least one.
        """
        per_shard = self.samples / self.shards
        streams = min(-(-interleave.streams // nodes), interleave.streams)
        length = self.samples / interleave.streams
        per_block = min(interleave.block, length) / per_shard + 1  # it begins and ends within a shard
        return round(min((streams + min(_AHEAD, streams)) * per_block, self.shards) / self.shards * self.bytes)


def choose_interleave(
    data: DataSize,
    batch_size: int,
    *,
    nodes: int = 1,
    cache_bytes: float | None = None,
    streams: int | None = None,
    block: int | None = None,
) -> Interleave:
    """Choose the interleave with the largest window for which the cache is large enough.

    The window has up to 8 million samples, 16 million on 64 nodes, and so on. A single node can hold it, so that the
    run can move there; if that allows less than 2 million, each of the `nodes` can. `cache_bytes` of a node is None if
    all shards are local. The user may choose `streams` and `block`.

    Raises:
        UserError: `streams` does not divide the batch, or no interleave fits into the cache.
    """
    if streams is not None and (streams < 1 or batch_size % streams):
        raise UserError(f"data.shard_streams={streams} does not divide data.batch_size={batch_size}; choose a divisor.")
    numbers = [streams] if streams is not None else _stream_numbers(batch_size, max(data.shards, 1), nodes)
    if streams is not None and block is not None:
        return Interleave(streams, block)
    windows = list(WINDOWS)
    while 2 * windows[0] <= _PER_NODE * nodes:
        windows.insert(0, 2 * windows[0])
    of_one_node = windows.copy()
    while windows[-1] > _SMALLEST_BLOCK * numbers[-1]:
        windows.append(windows[-1] // 2)
    for considered, counted in ((of_one_node, 1), (windows[len(of_one_node) - 1 :], nodes)):
        for window in considered:
            for number in numbers:
                found = Interleave(number, block or max(window // number, 1))
                if cache_bytes is None or data.resident_bytes(found, counted) <= _FULL * cache_bytes:
                    return found
    smallest = data.resident_bytes(Interleave(numbers[-1], block or _SMALLEST_BLOCK), nodes)
    size, needed = (cache_bytes or 0) / 1e9, 1.01 * smallest / _FULL / 1e9
    raise UserError(f"The cache of {size:.3g} GB is too small for a batch: set data.cache_gb={needed:.3g} or more.")


def _stream_numbers(batch_size: int, shards: int, nodes: int) -> list[int]:
    """Return possible numbers of streams, divisors of the batch, the best first.

    The node count divides them if it can, so that no two nodes read the same streams.
    """
    most = min(max(_STREAMS, nodes), shards, batch_size)
    divisors = [number for number in range(most, 0, -1) if batch_size % number == 0]
    return [number for number in divisors if number % nodes == 0] or divisors
