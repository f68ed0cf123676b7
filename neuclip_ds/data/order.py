"""The order of samples: a pure function of (manifest, seed, epoch, step), whatever ranks and workers there are.

In each epoch the shards are permuted and laid end to end, which gives every sample a position 0 ... n - 1. The
positions are split into S slots of n/S (sizes differ by one at most); within a slot, blocks of `shuffle_block`
positions are shuffled. A batch of B takes the next B/S positions of every slot. Nothing of size n is ever built:
the shuffle of a block is a keyed permutation evaluated where it is needed, so that a start anywhere is cheap.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from neuclip_ds.data.hashing import hash64, mix64
from neuclip_ds.errors import UserError

_MAX_SLOTS = 1024
_ROUNDS = 6
_SHARDS, _SAMPLES = 0, 1  # keep the two uses of the hash apart


class _Layout(NamedTuple):
    """The shards of one epoch in their permuted order: positions and indices at which each one starts."""

    epoch: int
    positions: NDArray[np.int64]  # (n_shards,)
    indices: NDArray[np.int64]  # (n_shards,)


class GlobalOrder:
    """Batches of global sample indices.

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
        slots: int | None = None,
        shuffle_block: int = 80_000,
        tail: Literal["pad", "drop"] = "pad",
    ) -> None:
        """
        Args:
            shard_starts: (n_shards,) global index of each shard's first sample.
            shard_sizes: (n_shards,) samples in each shard.
            batch_size: global batch B.
            seed: non-negative.
            slots: S, a divisor of B; by default the largest that is <= n_shards and <= 1024.
            shuffle_block: positions that are shuffled together within a slot.
            tail: `pad` takes every sample exactly once an epoch and fills the last batch with -1; `drop` leaves out
                n mod B samples, other ones in every epoch.

        Raises:
            UserError: fewer than 2 samples, fewer than a batch under `drop`, or slots that do not divide the batch.
        """
        self.batch_size, self.seed, self.tail = batch_size, seed, tail
        self._starts = np.asarray(shard_starts, dtype=np.int64)
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.n = int(self._sizes.sum())
        if self.n < 2:
            raise UserError(f"The data set has {self.n} samples; contrastive training needs at least 2.")
        if tail == "drop" and self.n < batch_size:
            raise UserError(
                f"data.tail=drop leaves no batch: {self.n} samples, batch_size={batch_size}; lower it or use tail=pad."
            )
        if slots is not None and (slots < 1 or batch_size % slots):
            raise UserError(f"data.slots={slots} does not divide data.batch_size={batch_size}; choose a divisor.")
        self.slots = slots or _largest_divisor(batch_size, min(len(self._sizes), _MAX_SLOTS))
        self._bounds = self.n * np.arange(self.slots + 1) // self.slots  # (S + 1,) where slots start and end
        self._block = shuffle_block
        self._layout: _Layout | None = None

    @property
    def steps_per_epoch(self) -> int:
        """ceil(n / B) under `pad`, floor(n / B) under `drop`."""
        return self.n // self.batch_size if self.tail == "drop" else -(-self.n // self.batch_size)

    def batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """(B,) global indices of a step of an epoch, -1 where a slot has ended; IndexError beyond the epoch."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch}")
        lane = self.batch_size // self.slots
        slot = np.arange(self.slots)[:, None]  # (S, 1)
        length = np.diff(self._bounds)[:, None]  # (S, 1)
        within = step * lane + np.arange(lane)[None, :]  # (1, B/S) positions within each slot
        present = within < length  # (S, B/S)
        block_number = within // self._block
        block_start = block_number * self._block
        block_size = np.clip(length - block_start, 1, self._block)  # (S, B/S)
        offset = np.where(present, within - block_start, 0)
        key = hash64(self.seed, _SAMPLES, epoch, slot, block_number)
        position = self._bounds[:-1, None] + block_start + permute(offset, block_size, key)
        # Absent rows are computed like the others, at a position that may lie beyond the end, and blanked here.
        return np.where(present, self._index_at(epoch, np.minimum(position, self.n - 1)), -1).ravel()

    def _index_at(self, epoch: int, position: NDArray[np.int64]) -> NDArray[np.int64]:
        layout = self._layout_of(epoch)
        shard = np.searchsorted(layout.positions, position, side="right") - 1
        return layout.indices[shard] + position - layout.positions[shard]

    def _layout_of(self, epoch: int) -> _Layout:
        """The epoch's shard permutation; the last one is kept, being the same for all steps of an epoch."""
        if self._layout is None or self._layout.epoch != epoch:
            keys = hash64(self.seed, _SHARDS, epoch, np.arange(len(self._sizes)))
            shards = np.argsort(keys, kind="stable")
            ends = np.cumsum(self._sizes[shards])
            self._layout = _Layout(epoch, ends - self._sizes[shards], self._starts[shards])
        return self._layout


def permute(values: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where a keyed permutation of 0 ... size - 1 sends each value.

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
    """A bijection of 0 ... a * b - 1, with a = ceil(sqrt(size)) and b = ceil(size / a); all arrays (m,)."""
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
