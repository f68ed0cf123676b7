"""The order of samples: a pure function of (manifest, seed, epoch, step), independent of ranks and workers.

In each epoch the shards are permuted and concatenated, which gives every sample a position 0 ... n - 1. The positions
are split into S shard streams of n/S (sizes differ by one at most); within a stream, blocks of `shuffle_block`
positions are shuffled. A batch of B takes the next B/S positions of every stream. Nothing of size n is ever built: the
shuffle of a block is a keyed permutation evaluated on demand, so that resuming anywhere is cheap.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from neuclip_ds.data.hashing import hash64, mix64
from neuclip_ds.errors import UserError

_MAX_STREAMS = 1024
_ROUNDS = 6
_EXACT_POSITIONS = 1024  # positions of a block and stream for which `shards_ahead` is exact
_SHARDS, _SAMPLES = 0, 1  # domain separation of the hash


class _Layout(NamedTuple):
    """The shards of one epoch in their permuted order; all arrays (n_shards,)."""

    epoch: int
    shards: NDArray[np.int64]  # shard numbers
    positions: NDArray[np.int64]  # position of each one's first sample
    indices: NDArray[np.int64]  # global index of each one's first sample


class ShardRequest(NamedTuple):
    """A shard from which rows of the batches `first` ... `last` are read; batches are counted across epochs."""

    first: int
    last: int
    shard: int


class GlobalOrder:
    """The global sample indices of every batch.

    Args:
        shard_starts: (n_shards,) global index of each shard's first sample.
        shard_sizes: (n_shards,) samples in each shard.
        batch_size: global batch size B.
        seed: non-negative seed of all permutations.
        streams: number S of shard streams, a divisor of B; by default the largest <= min(n_shards, 1024).
        shuffle_block: positions that are shuffled together within a stream.
        tail: `pad` takes every sample exactly once per epoch and fills the last batch with -1; `drop` omits n mod B
            samples, different ones in every epoch.

    Raises:
        UserError: fewer than 2 samples, less than a batch under `drop`, or streams that do not divide the batch.

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
        *,
        streams: int | None = None,
        shuffle_block: int = 80_000,
        tail: Literal["pad", "drop"] = "pad",
    ) -> None:
        self.batch_size, self.seed, self.tail = batch_size, seed, tail
        self._starts = np.asarray(shard_starts, dtype=np.int64)
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.n = int(self._sizes.sum())
        self._check(streams)
        self.streams = streams or _largest_divisor(batch_size, min(len(self._sizes), _MAX_STREAMS))
        self._bounds = self.n * np.arange(self.streams + 1) // self.streams  # (S + 1,) boundaries of the streams
        self._block = shuffle_block
        self._layout: _Layout | None = None

    def _check(self, streams: int | None) -> None:
        if self.n < 2:
            raise UserError(f"The data set has {self.n} samples; contrastive training needs at least 2.")
        if self.tail == "drop" and self.n < self.batch_size:
            raise UserError(
                f"data.last_batch=drop leaves no batch: {self.n} samples, batch_size={self.batch_size}; "
                "lower it or set data.last_batch=pad."
            )
        if streams is not None and (streams < 1 or self.batch_size % streams):
            raise UserError(
                f"data.shard_streams={streams} does not divide data.batch_size={self.batch_size}; choose a divisor."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps: ceil(n / B) under `pad`, floor(n / B) under `drop`."""
        return self.n // self.batch_size if self.tail == "drop" else -(-self.n // self.batch_size)

    @property
    def last_batch_size(self) -> int:
        """Number of samples in an epoch's last batch, which may have empty rows under `pad`."""
        before = (self.steps_per_epoch - 1) * (self.batch_size // self.streams)  # positions of a stream
        return int(np.clip(np.diff(self._bounds) - before, 0, self.batch_size // self.streams).sum())

    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        """Return the global indices of a step's rows, by default all B, -1 where a stream has ended.

        Raises IndexError beyond the epoch.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is out of range for an epoch of {self.steps_per_epoch} steps")
        lane = self.batch_size // self.streams
        stream, place = np.divmod(np.arange(self.batch_size)[rows], lane)  # all arrays (b,) from here on
        length = np.diff(self._bounds)[stream]
        within = step * lane + place  # position within the stream
        present = within < length
        block_number = within // self._block
        block_start = block_number * self._block
        block_size = np.clip(length - block_start, 1, self._block)
        offset = np.where(present, within - block_start, 0)
        key = hash64(self.seed, _SAMPLES, epoch, stream, block_number)
        position = self._bounds[stream] + block_start + permute(offset, block_size, key)
        # Absent rows are computed like the others, possibly at a position beyond the end, and masked here.
        return np.where(present, self._index_at(epoch, np.minimum(position, self.n - 1)), -1)

    def shards_ahead(self, epoch: int, step: int, rows: Sequence[slice]) -> Iterator[ShardRequest]:
        """Iterate endlessly over the shards that these rows of the batches read, from `step` of `epoch` on.

        Shards come in order of first use, once per block of the shuffle (all streams reach their next block in the
        same step), so a shard comes again when a later block uses it. No shard is missing or late. For blocks of more
        than 1024 positions `first` may be early and a shard may not be used at all; `last` is the end of the block.

        Args:
            epoch, step: as for `batch`; `step` may be steps_per_epoch.
            rows: rows of the global batch, those of all ranks of a node.
        """
        epoch, step = epoch + step // self.steps_per_epoch, step % self.steps_per_epoch
        lane = self.batch_size // self.streams
        wanted = np.zeros((self.streams, lane), dtype=bool)  # by place in the batch
        for part in rows:
            wanted.reshape(-1)[part] = True
        streams = np.flatnonzero(wanted.any(axis=1))
        length = np.minimum(np.diff(self._bounds)[streams], self.steps_per_epoch * lane)
        if np.all(length <= wanted[streams].argmax(axis=1)):
            return  # fewer samples than rows: these rows are always empty
        while True:
            for block in range(step * lane // self._block, -(-int(length.max()) // self._block)):
                yield from self._requests(epoch, step, wanted[streams], streams, block)
            epoch, step = epoch + 1, 0

    def _requests(
        self, epoch: int, step: int, wanted: NDArray[np.bool_], streams: NDArray[np.int64], block: int
    ) -> Iterator[ShardRequest]:
        """Iterate over the shards of one block of each of `streams`, (s,), from `step` on.

        `wanted`, (s, B/S), tells which of their places in the batch are read.
        """
        lane, layout = self.batch_size // self.streams, self._layout_of(epoch)
        begin = self._bounds[streams] + block * self._block  # (s,) positions
        size = np.clip(self._bounds[streams + 1] - begin, 0, self._block)
        end = np.minimum(block * self._block + size, self.steps_per_epoch * lane)  # (s,) within each stream, as below
        within = np.arange(max(block * self._block, step * lane), (block + 1) * self._block)[
            None, :_EXACT_POSITIONS
        ]  # (1, m)
        needed = (within < end[:, None]) & wanted[:, within[0] % lane]  # (s, m)
        offset = np.where(needed, within - block * self._block, 0)
        key = hash64(self.seed, _SAMPLES, epoch, streams, block)[:, None]
        position = begin[:, None] + permute(offset, np.maximum(size, 1)[:, None], key)
        first = np.broadcast_to(within // lane, needed.shape)
        # Positions that are not evaluated may be in any shard of their block.
        beyond = int(within[0, -1]) + 1
        low = np.searchsorted(layout.positions, begin, side="right") - 1
        high = np.searchsorted(layout.positions, begin + size, side="left")
        others = [np.arange(*ends) for ends in zip(low[end > beyond], high[end > beyond], strict=True)]
        found = np.concatenate([self._slot_of(layout, position[needed]), *others])
        steps = np.full(len(found), beyond // lane)
        steps[: needed.sum()] = first[needed]
        by_step = np.argsort(steps, kind="stable")
        _, index = np.unique(found[by_step], return_index=True)
        before, last = epoch * self.steps_per_epoch, (int(end.max()) - 1) // lane
        for slot in by_step[np.sort(index)].tolist():
            shard = int(layout.shards[found[slot]])
            if self._sizes[shard]:
                yield ShardRequest(before + int(steps[slot]), before + last, shard)

    def _index_at(self, epoch: int, position: NDArray[np.int64]) -> NDArray[np.int64]:
        layout = self._layout_of(epoch)
        slot = self._slot_of(layout, position)
        return layout.indices[slot] + position - layout.positions[slot]

    def _slot_of(self, layout: _Layout, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of the permuted shards each position is in, by its number in the permutation."""
        return np.searchsorted(layout.positions, position, side="right") - 1

    def _layout_of(self, epoch: int) -> _Layout:
        """Return the epoch's shard permutation, cached for the other steps of the epoch."""
        if self._layout is None or self._layout.epoch != epoch:
            keys = hash64(self.seed, _SHARDS, epoch, np.arange(len(self._sizes)))
            shards = np.argsort(keys, kind="stable")
            ends = np.cumsum(self._sizes[shards])
            self._layout = _Layout(epoch, shards, ends - self._sizes[shards], self._starts[shards])
        return self._layout


def permute(values: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Apply a keyed permutation of 0 ... size - 1 to each value.

    Elementwise over broadcast arrays, 0 <= value < size; equal (size, key) is one permutation. A Feistel network on
    the smallest a x b rectangle that holds the range, walked until the image is inside it (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002).
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
    """Apply a bijection of 0 ... a * b - 1, with a = ceil(sqrt(size)), b = ceil(size / a); all arrays (m,)."""
    a = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    b = (sizes + a - np.uint64(1)) // a
    high, low = values // b, values % b
    for number in range(_ROUNDS):
        round_key = hash64(number) ^ keys
        if number % 2 == 0:
            high = (high + mix64(low ^ round_key) % a) % a
        else:
            low = (low + mix64(high ^ round_key) % b) % b
    return high * b + low


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)
