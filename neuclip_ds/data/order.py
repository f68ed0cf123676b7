"""The sample order: a pure function of (manifest, batch size, interleave, seed, epoch, step).

The order does not depend on the number of ranks or workers. Only the interleave depends on the number of nodes with
which a run starts; a resumed run keeps it.

In each epoch, the shards are permuted and concatenated, which gives every sample a position 0 ... n - 1. The positions
are split into S shard streams whose sizes differ by at most one, and every stream is shuffled in blocks of positions. A
batch of B samples takes the next B/S positions of every stream. No array of size n is ever built: the shuffle of a
block is a keyed permutation that is evaluated on demand, so resuming at any step is cheap.

The first blocks of the streams differ in length, so that the streams reach their next blocks at different steps. A
node thus needs new shards for one stream at a time, rather than for all streams at once.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from neuclip_ds.data.interleave import Interleave, choose_interleave
from neuclip_ds.errors import UserError, counted

_ROUNDS = 6
_BLOCKS_AHEAD = 2  # number of upcoming blocks for whose shards a node's cache must have room
# how many positions and epochs `resident_bytes` examines
_EXAMINED_POSITIONS = 1 << 16
_EXAMINED_EPOCHS = 2
# domain separators for the hash
_SHARDS = 0
_SAMPLES = 1
_SPREAD = np.uint64(0x9E3779B9)  # 2^32 divided by the golden ratio; its multiples modulo 2^32 are spread evenly
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the increment of splitmix64
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class _ShardPermutation(NamedTuple):
    """The shards of one epoch in permuted order; all arrays have shape (n_shards,)."""

    shards: NDArray[np.int64]  # shard numbers
    positions: NDArray[np.int64]  # position of each shard's first sample
    indices: NDArray[np.int64]  # global index of each shard's first sample


class GlobalOrder:
    """An order of samples, which determines the global sample indices in every batch of size B.

    Args:
        shard_starts, shard_sizes: (n_shards,) the index of each shard's first sample, and each shard's sample count.
        batch_size: the global batch size B.
        seed: the seed of the order.
        interleave: the number of streams (a divisor of B) and the block size; the default suits local shards.
        drop_last: whether to omit n mod B samples, chosen anew in each epoch. Otherwise, every sample occurs exactly
            once per epoch, and a partial last batch is padded with -1.

    Raises:
        UserError: there are fewer than 2 samples or, with `drop_last`, fewer than B.

    Example:
        order = GlobalOrder(manifest.starts, manifest.sizes, batch_size=4096, seed=0)
        indices = order.batch(epoch=3, step=17)  # (4096,); rank r of K takes [r * 4096 / K, (r + 1) * 4096 / K)
    """

    def __init__(
        self,
        shard_starts: ArrayLike,
        shard_sizes: ArrayLike,
        batch_size: int,
        seed: int = 0,
        interleave: Interleave | None = None,
        *,
        drop_last: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self._starts = np.asarray(shard_starts, dtype=np.int64)
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.n = int(self._sizes.sum())
        if self.n < 2:
            raise UserError(
                f"The training data, or one of its sources, contains {counted(self.n, 'sample')}, but at least 2 are "
                "needed: check data.train."
            )
        if drop_last and self.n < batch_size:
            raise UserError(
                f"data.drop_last=true leaves no batch, because the {self.n} samples are fewer than "
                f"data.batch_size={batch_size}: lower data.batch_size, or set data.drop_last=false."
            )
        self.interleave = interleave or choose_interleave(len(self._sizes), batch_size)
        streams = self.interleave.streams
        block = self.interleave.block
        self._bounds = self.n * np.arange(streams + 1) // streams  # (S + 1,) boundaries of the streams
        self._rows_per_stream = batch_size // streams  # positions that a batch takes from each stream
        self._phases = np.zeros(streams, dtype=np.int64)  # (S,) how much shorter each stream's first block is
        if block < self.n // streams:
            fractions = (np.arange(streams, dtype=np.uint64) * _SPREAD) % np.uint64(1 << 32)  # in units of 2^-32
            self._phases = (fractions * np.uint64(block) >> np.uint64(32)).astype(np.int64)
        self._permutations: dict[int, _ShardPermutation] = {}  # by epoch

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps per epoch: floor(n / B) with `drop_last`, otherwise ceil(n / B)."""
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    @property
    def stream_lengths(self) -> NDArray[np.int64]:
        """The number of positions in each stream, (S,)."""
        return np.diff(self._bounds)

    @property
    def last_batch_size(self) -> int:
        """The number of samples in an epoch's last batch, which may have padding rows unless `drop_last` is set."""
        positions_before = (self.steps_per_epoch - 1) * self._rows_per_stream  # per stream, in earlier batches
        return int(np.clip(self.stream_lengths - positions_before, 0, self._rows_per_stream).sum())

    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        """Return the global indices of the given rows of a step's batch (by default, all B rows), with -1 for padding.

        Raises IndexError if the step is outside the epoch.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is out of range for an epoch of {self.steps_per_epoch} steps")
        row_numbers = np.arange(*rows.indices(self.batch_size))  # (b,), as are the arrays below
        stream, row_of_stream = np.divmod(row_numbers, self._rows_per_stream)
        return self.samples(epoch, stream, step * self._rows_per_stream + row_of_stream)

    def epochs_and_indices(
        self, epoch: int, step: int, rows: slice = slice(None)
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch of each row (used to seed the augmentation) and the rows' global indices (-1 for padding).

        Raises IndexError if the step is outside the epoch.
        """
        indices = self.batch(epoch, step, rows)
        return np.full(len(indices), epoch), indices

    def samples(self, epoch: int, stream: NDArray[np.int64], within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, elementwise, the global index at position `within` of a stream, or -1 past the stream's end."""
        is_present = within < self.stream_lengths[stream]
        # shuffle the block that contains each position
        block_number = (within + self._phases[stream]) // self.interleave.block
        start, end = self._bounds_of_block(stream, block_number)
        offset = np.where(is_present, within - start, 0)
        key = hash64(self.seed, _SAMPLES, epoch, stream, block_number)
        position = self._bounds[stream] + start + permute(offset, np.maximum(end - start, 1), key)
        # absent rows are computed too: their positions, which may exceed n - 1, are clipped, and their indices masked
        position = np.minimum(position, self.n - 1)
        # find the shard of each position
        permutation = self._permutation(epoch)
        slot = self._slots(permutation, position)
        index = permutation.indices[slot] + position - permutation.positions[slot]
        return np.where(is_present, index, -1)

    def block_bounds(self, stream: int, within: int) -> tuple[int, int]:
        """Return the bounds [start, end) of the block that contains position `within` of a stream."""
        block_number = (within + int(self._phases[stream])) // self.interleave.block
        start, end = self._bounds_of_block(np.int64(stream), np.int64(block_number))
        return int(start), int(end)

    def shards_between(self, epoch: int, stream: int, start: int, end: int) -> list[int]:
        """Return the shards that contain the samples at positions start ... end - 1 of a stream."""
        permutation = self._permutation(epoch)
        first, last = self._slots(permutation, self._bounds[stream] + np.array([start, end - 1]))
        shards = permutation.shards[first : last + 1]
        return [int(shard) for shard in shards[self._sizes[shards] > 0]]

    def resident_bytes(self, shard_bytes: ArrayLike, nodes: int = 1) -> int:
        """Estimate the largest total size in bytes of the shards that any node needs at once in the first two epochs.

        A node needs the shards of the current block in each of its streams and of the two blocks that will start next
        (of only one such block if the node has a single stream).

        Args:
            shard_bytes: (n_shards,) the size of each shard in bytes.
            nodes: the number of nodes over which the streams are distributed.
        """
        used_bytes = np.where(self._sizes > 0, np.asarray(shard_bytes, dtype=np.int64), 0)  # (n_shards,)
        streams = self.interleave.streams
        block = self.interleave.block
        lengths = self.stream_lengths

        # the streams [first_stream, end_stream) of each node, (nodes,)
        first_stream = np.arange(nodes) * streams // nodes
        end_stream = -(-np.arange(1, nodes + 1) * streams // nodes)

        # the first and last position that each stream needs at several moments of an epoch, (moments, S)
        positions_ahead = block * _BLOCKS_AHEAD // max(_BLOCKS_AHEAD, streams // nodes)  # until two more blocks begin
        moments = max(256, _EXAMINED_POSITIONS // streams)
        reached = np.linspace(0, lengths.max() - 1, moments).astype(np.int64)[:, None]
        current = np.minimum(reached, lengths - 1)
        upcoming = np.minimum(current + positions_ahead, lengths - 1)
        every_stream = np.arange(streams)
        current_start, _ = self._bounds_of_block(every_stream, (current + self._phases) // block)
        _, upcoming_end = self._bounds_of_block(every_stream, (upcoming + self._phases) // block)
        first_position = self._bounds[:-1] + current_start
        last_position = self._bounds[:-1] + upcoming_end - 1

        most_bytes = 0
        for epoch in range(_EXAMINED_EPOCHS):
            permutation = self._permutation(epoch)
            bytes_before = np.append(0, np.cumsum(used_bytes[permutation.shards]))
            first_slot = self._slots(permutation, first_position)
            last_slot = self._slots(permutation, last_position)
            bytes_of_stream = bytes_before[last_slot + 1] - bytes_before[first_slot]  # (moments, S)
            bytes_of_first_streams = np.pad(bytes_of_stream.cumsum(axis=1), ((0, 0), (1, 0)))  # (moments, S + 1)
            bytes_of_node = bytes_of_first_streams[:, end_stream] - bytes_of_first_streams[:, first_stream]
            most_bytes = max(most_bytes, int(bytes_of_node.max()))
        return min(most_bytes, int(used_bytes.sum()))

    def _bounds_of_block(
        self, stream: NDArray[np.int64], number: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return, elementwise, the positions in a stream at which block `number` begins and ends."""
        begin = number * self.interleave.block - self._phases[stream]
        return np.maximum(begin, 0), np.minimum(begin + self.interleave.block, self.stream_lengths[stream])

    def _slots(self, permutation: _ShardPermutation, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each position, which shard contains it, as an index into the permuted order."""
        return np.searchsorted(permutation.positions, position, side="right") - 1

    def _permutation(self, epoch: int) -> _ShardPermutation:
        """Return the shard permutation of an epoch; the two most recently computed permutations are cached."""
        if epoch not in self._permutations:
            while len(self._permutations) > 1:
                oldest = next(iter(self._permutations))
                del self._permutations[oldest]
            keys = hash64(self.seed, _SHARDS, epoch, np.arange(len(self._sizes)))
            shards = np.argsort(keys, kind="stable")
            ends = np.cumsum(self._sizes[shards])
            self._permutations[epoch] = _ShardPermutation(
                shards=shards, positions=ends - self._sizes[shards], indices=self._starts[shards]
            )
        return self._permutations[epoch]


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finalizer, a bijection of 64-bit words, elementwise."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
        values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
        return values ^ (values >> _SHIFTS[2])


def hash64(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Broadcast the non-negative integers `parts` together, and return a 64-bit hash of each tuple of elements.

    All randomness in the sample order comes from this hash, splitmix64 (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", 2014), because NumPy's and PyTorch's generators may change between versions.
    """
    digest = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            digest = mix64(digest ^ mix64(np.asarray(part, dtype=np.uint64) + _GOLDEN))
    return digest


def permute(values: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Apply a keyed permutation of 0 ... size - 1 to each value.

    The arrays are broadcast together. Each value must be in 0 ... size - 1, and elements with equal (size, key) share
    one permutation. A Feistel network on an a x b rectangle that covers the range is applied until the result is in the
    range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    shape = np.broadcast_shapes(values.shape, sizes.shape, keys.shape)
    image = np.broadcast_to(values, shape).astype(np.uint64).ravel()
    size = np.broadcast_to(sizes, shape).astype(np.uint64).ravel()
    key = np.broadcast_to(keys, shape).ravel()
    outside = np.arange(image.size)
    while outside.size:
        image[outside] = _feistel(image[outside], size[outside], key[outside])
        outside = outside[image[outside] >= size[outside]]
    return image.astype(np.int64).reshape(shape)


def _feistel(values: NDArray[np.uint64], sizes: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a bijection of 0 ... a * b - 1 with a = ceil(sqrt(size)) and b = ceil(size / a). Arrays have shape (m,)."""
    a = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    b = (sizes + a - np.uint64(1)) // a
    high = values // b
    low = values % b
    for number in range(_ROUNDS):
        round_key = hash64(number) ^ keys
        if number % 2 == 0:
            high = (high + mix64(low ^ round_key) % a) % a
        else:
            low = (low + mix64(high ^ round_key) % b) % b
    return high * b + low
