"""Choose how many streams of shards to interleave: few enough for the nodes' caches, but enough to mix samples well.

A batch takes the same number of samples from each of S streams. Each stream is shuffled in blocks, so S blocks are in
use at a time; together, they form a window of S x block samples. If shards are remote, the nodes' caches together must
have room for all shards in the window. A window of 8 million samples of 45 kB each needs about 400 GB of cache in total
(calculated).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from neuclip_ds.errors import UserError

WINDOW = 8_000_000  # samples that are shuffled together on up to 16 nodes
_WINDOW_PER_NODE = 500_000  # samples per node in the larger window for more than 16 nodes
_WINDOW_RATIO = 2**-0.125  # ratio of successive window sizes, if several are tried
_STREAMS = 64  # maximum number of streams on up to 64 nodes; on more nodes, at most one per node
FULL = 0.9  # the fraction of a cache that an interleave may need, and that shards for later batches may fill
_SMALLEST_BLOCK = 100


class Interleave(NamedTuple):
    """The number of shard streams and the block size of a sample order."""

    streams: int  # S, a divisor of the global batch
    block: int  # positions of a stream that are shuffled together

    @property
    def window(self) -> int:
        """The number of samples that are shuffled together."""
        return self.streams * self.block


def choose_interleave(
    shards: int,
    batch_size: int,
    *,
    nodes: int = 1,
    cache_bytes: float | None = None,
    resident_bytes: Callable[[Interleave, int], float] = lambda interleave, nodes: 0,
    streams: int | None = None,
    block: int | None = None,
) -> Interleave:
    """Choose the interleave with the largest window that fits in the nodes' caches.

    Unless `block` is given, the window has up to 8 million samples, or 500,000 per node on more than 16 nodes. If
    possible, it also fits in the caches of half the nodes, so that the run can resume on half the nodes. A given
    `streams` or `block` is not changed; if both are given, the cache is not considered.

    Args:
        shards: the number of shards, which limits the number of streams.
        batch_size: the global batch size.
        nodes: the number of nodes (default: 1).
        cache_bytes: the size of a node's cache in bytes; None if all shards are read in place.
        resident_bytes: a function of the interleave and the number of nodes; it returns the total bytes of the shards
            that a node needs at any one time (see `GlobalOrder.resident_bytes`).

    Raises:
        UserError: `streams` is not a positive divisor of the batch size, or no interleave fits in the cache.
    """
    if streams is not None and (streams < 1 or batch_size % streams):
        raise UserError(f"data.shard_streams={streams} does not divide data.batch_size={batch_size}; choose a divisor.")
    if streams is not None and block is not None:
        return Interleave(streams, block)
    stream_counts = [streams] if streams is not None else _stream_counts(batch_size, max(shards, 1), nodes)
    largest_window = max(WINDOW, _WINDOW_PER_NODE * nodes)
    if cache_bytes is None:
        return Interleave(stream_counts[0], block or max(largest_window // stream_counts[0], 1))

    candidates = []
    for count in stream_counts:
        blocks = [block] if block else _block_sizes(largest_window, count)
        candidates.append([Interleave(count, size) for size in blocks])

    def fits(node_counts: set[int], interleave: Interleave) -> bool:
        return all(resident_bytes(interleave, count) <= FULL * cache_bytes for count in node_counts)

    # prefer an interleave that also fits in the caches of half the nodes
    half_the_nodes = -(-nodes // 2)
    best = _largest_fit(candidates, partial(fits, {half_the_nodes, nodes}))
    if best is None:
        best = _largest_fit(candidates, partial(fits, {nodes}))
    if best is not None:
        return best

    smallest = resident_bytes(Interleave(stream_counts[-1], block or _SMALLEST_BLOCK), nodes)
    other_fix = ""
    if block is not None:
        other_fix = ", or lower data.shuffle_block_size"
    elif streams is not None:
        other_fix = ", or lower data.shard_streams"
    raise UserError(
        f"The cache of {in_gigabytes(cache_bytes)} GB is too small for the remote files that a node reads at "
        f"the same time: set data.cache_gb={in_gigabytes(1.01 * smallest / FULL)} or more{other_fix}."
    )


def _largest_fit(candidates: Sequence[Sequence[Interleave]], fits: Callable[[Interleave], bool]) -> Interleave | None:
    """Return the candidate with the largest window that fits, or None if no candidate fits.

    Each list contains the candidates with one number of streams, largest block first. The number decreases from list to
    list.
    """
    best: Interleave | None = None
    for of_one_count in candidates:
        # a smaller block needs fewer bytes, so the largest block that fits is found by bisection
        first_fit = bisect_left(of_one_count, True, key=fits)
        if first_fit < len(of_one_count) and (best is None or of_one_count[first_fit].window > best.window):
            best = of_one_count[first_fit]
        elif best is not None:  # fewer streams would give even smaller windows
            break
    return best


def in_gigabytes(size: float) -> str:
    """Return a size in bytes as a number of GB: three significant digits or, from 999.5 GB, a whole number."""
    return f"{size / 1e9:.3g}" if size < 999.5e9 else f"{size / 1e9:.0f}"  # .3g would round 999.5 to 1e+03


def _block_sizes(window: int, streams: int) -> list[int]:
    """Return the block sizes to try, largest first."""
    sizes = [max(window // streams, 1)]
    while sizes[-1] > _SMALLEST_BLOCK:
        sizes.append(max(int(window / streams * _WINDOW_RATIO ** len(sizes)), _SMALLEST_BLOCK))
    return sizes


def _stream_counts(batch_size: int, shards: int, nodes: int) -> list[int]:
    """Return the stream counts to try, best first; all of them divide the batch size.

    If possible, they are also multiples of the number of nodes, so that no two nodes read the same stream.
    """
    most = min(max(_STREAMS, nodes), shards, batch_size)
    divisors = [count for count in range(most, 0, -1) if batch_size % count == 0]
    multiples_of_nodes = [count for count in divisors if count % nodes == 0]
    return multiples_of_nodes or divisors
