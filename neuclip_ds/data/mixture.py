"""The sample order of several weighted sources: a pure function of (seed, step), as for a single source.

All sources have the same number S of shard streams (neuclip_ds/data/order.py), and epochs are counted per source. The B
rows of a batch form S blocks of B/S rows, one block for each stream. A pattern, fixed for all steps, assigns the rows
of each block to sources. At step t, stream s uses block j = s + t (mod S) of the pattern. The number of rows from a
source is therefore the same in every batch, and all streams of a source advance at the same rate.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError


class MixtureOrder:
    """A sample order for a mixture of sources, with the same interface as `GlobalOrder`.

    An epoch has about as many samples as all sources combined, and all batches are full. The order of each source must
    have the mixture's batch size and number of streams; block sizes may differ. `weights` are the relative shares of
    rows from the m sources. Raises UserError if a weight is negative or not finite, or if no weight is positive.
    """

    def __init__(self, sources: Sequence[GlobalOrder], weights: Sequence[float], interleave: Interleave) -> None:
        self.batch_size, self.seed, self.interleave = sources[0].batch_size, sources[0].seed, interleave
        self.n = sum(source.n for source in sources)
        self.sources, self._streams = sources, interleave.streams
        self._lane = self.batch_size // self._streams
        shares = np.array(weights, dtype=np.float64)
        if not (np.isfinite(shares).all() and shares.min() >= 0 and shares.sum() > 0):
            raise UserError(f"The weights {list(weights)} of a mixture are not positive numbers.")
        # (S, B/S), the source of each row
        self._pattern = _spread(shares / shares.sum(), self.batch_size).reshape(self._streams, self._lane)
        is_source = self._pattern[None] == np.arange(len(shares))[:, None, None]  # (m, S, B/S)
        self._rank = np.take_along_axis(is_source.cumsum(axis=2) - 1, self._pattern[None], axis=0)[0]
        per_block = is_source.sum(axis=2)  # (m, S)
        twice = np.concatenate([per_block, per_block], axis=1)
        self._before = np.concatenate([np.zeros((len(shares), 1), np.int64), twice.cumsum(axis=1)], axis=1)
        self._per_cycle = per_block.sum(axis=1)  # (m,), samples of each source that a stream yields in S steps

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch, which has about as many samples as all sources combined."""
        return max(1, self.n // self.batch_size)

    @property
    def last_batch_size(self) -> int:
        """The number of samples in the last batch, which is full like every other batch."""
        return self.batch_size

    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        """Return the global indices of the given rows of a step's batch (by default, all B rows)."""
        return self.visits(epoch, step, rows)[1]

    def visits(self, epoch: int, step: int, rows: slice = slice(None)) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the current epoch of each row's source, and the result of `batch`."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is out of range for an epoch of {self.steps_per_epoch} steps")
        number = epoch * self.steps_per_epoch + step
        stream, place = np.divmod(np.arange(*rows.indices(self.batch_size)), self._lane)  # all arrays below are (b,)
        block = (stream + number) % self._streams
        source, rank = self._pattern[block, place], self._rank[block, place]
        visits, index = np.zeros(len(stream), dtype=np.int64), np.zeros(len(stream), dtype=np.int64)
        for which, order in enumerate(self.sources):
            own = np.flatnonzero(source == which)
            if not len(own):
                continue
            taken = self._taken(which, stream[own], number)
            visits[own], within = np.divmod(taken + rank[own], order.stream_lengths[stream[own]])
            for visit in np.unique(visits[own]):
                now = visits[own] == visit
                index[own[now]] = order.samples(int(visit), stream[own[now]], within[now])
        return visits, index

    def taken(self, which: int, stream: int, number: int) -> int:
        """Return how many samples the steps before step `number` take from a stream of a source."""
        return int(self._taken(which, np.array(stream), number))

    def _taken(self, which: int, stream: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        cycles, rest = divmod(number, self._streams)
        before = self._before[which]
        return cycles * self._per_cycle[which] + before[stream + rest] - before[stream]

    def step_of(self, which: int, stream: int, taken: int) -> int:
        """Return the step that takes sample `taken` (0-based) of a source's stream; the source must have weight > 0."""
        low = max(0, taken // int(self._per_cycle[which]) - 1) * self._streams
        # the first step after which more than `taken` samples have been taken
        return low + bisect_right(
            range(3 * self._streams), 0, key=lambda n: self.taken(which, stream, low + n + 1) > taken
        )


BatchOrder = GlobalOrder | MixtureOrder


def _spread(weights: NDArray[np.float64], rows: int) -> NDArray[np.int64]:
    """Return the source of each row, (rows,); each source gets a whole number of rows, which are spread evenly."""
    shares = weights * rows
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: rows - counts.sum()]] += 1
    places = [(np.arange(count) + 0.5) / max(count, 1) for count in counts]
    sources = np.repeat(np.arange(len(weights)), counts)
    return sources[np.argsort(np.concatenate(places), kind="stable")]
