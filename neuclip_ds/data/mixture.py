"""The sample order of several weighted sources, which is a pure function like the order of a single source.

All sources have the same number S of shard streams (neuclip_ds/data/order.py), and epochs are counted per source. The B
rows of a batch form S blocks of B/S rows, one block for each stream. A pattern, fixed for all steps, assigns the rows
of each block to sources. At step t, stream s uses block j = s + t (mod S) of the pattern. The number of rows from a
source is therefore the same in every batch, and all streams of a source advance at the same rate.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError


class MixtureOrder:
    """A sample order for a mixture of sources; its batches are read in the same way as those of `GlobalOrder`.

    An epoch has about as many samples as all sources combined. All batches are full, unless a source has fewer samples
    than streams (as in some runs that began with an earlier version): streams without samples give rows of -1. The
    order of each source must have the mixture's batch size and number of streams; block sizes may differ. `weights` are
    the relative shares of rows from the m sources. Raises UserError if a weight is negative or not finite, if no weight
    is positive, or if a positive weight is too small for one row per batch.
    """

    def __init__(self, sources: Sequence[GlobalOrder], weights: Sequence[float], interleave: Interleave) -> None:
        self.batch_size = sources[0].batch_size
        self.seed = sources[0].seed
        self.interleave = interleave
        self.n = sum(source.n for source in sources)
        self.sources = sources
        self._streams = interleave.streams
        self._rows_per_stream = self.batch_size // self._streams
        relative_weights = np.array(weights, dtype=np.float64)  # (m,)
        if not (np.isfinite(relative_weights).all() and relative_weights.min() >= 0 and relative_weights.sum() > 0):
            raise UserError(
                f"The weights {list(weights)} of data.train must be at least 0 and finite, and at least one must be "
                "above 0."
            )

        # (S, B/S), the source of each row, and how many earlier rows of its block have the same source
        shares = relative_weights / relative_weights.sum()
        self._pattern = _spread_sources(shares, self.batch_size).reshape(self._streams, self._rows_per_stream)
        is_source = self._pattern[None] == np.arange(len(shares))[:, None, None]  # (m, S, B/S)
        unused = np.flatnonzero((shares > 0) & ~is_source.any(axis=(1, 2)))
        if len(unused):
            number = unused[0]
            raise UserError(
                f"Source number {number + 1} of data.train has a weight of {weights[number]:g} out of a total of "
                f"{sum(weights):g}, too little for one sample per batch of {self.batch_size}: raise the weight or "
                "data.batch_size, or remove the source."
            )
        rank_in_block = is_source.cumsum(axis=2) - 1  # valid where `is_source`
        self._rank_in_block = np.take_along_axis(rank_in_block, self._pattern[None], axis=0)[0]

        # (m, 2S + 1), the rows of each source in the blocks before block j; blocks S ... 2S - 1 repeat the pattern
        rows_per_block = is_source.sum(axis=2)  # (m, S)
        repeated = np.concatenate([rows_per_block, rows_per_block], axis=1)
        no_rows = np.zeros((len(shares), 1), np.int64)
        self._rows_before_block = np.concatenate([no_rows, repeated.cumsum(axis=1)], axis=1)
        self._rows_per_cycle = rows_per_block.sum(axis=1)  # (m,), samples of a source that a stream yields in S steps

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch, which has about as many samples as all sources combined."""
        return max(1, self.n // self.batch_size)

    @property
    def last_batch_size(self) -> int:
        """The number of samples in the last batch, which is full like every other batch."""
        return self.batch_size

    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        """Return the global indices of the given rows of a step's batch (by default, all B rows).

        Raises IndexError if the step is outside the epoch.
        """
        _, indices = self.epochs_and_indices(epoch, step, rows)
        return indices

    def epochs_and_indices(
        self, epoch: int, step: int, rows: slice = slice(None)
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the current epoch of each row's source, (b,), and the global indices of the rows, (b,).

        Raises IndexError if the step is outside the epoch.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is out of range for an epoch of {self.steps_per_epoch} steps")
        global_step = epoch * self.steps_per_epoch + step
        row_numbers = np.arange(*rows.indices(self.batch_size))  # (b,), as are the arrays below
        stream, row_of_block = np.divmod(row_numbers, self._rows_per_stream)
        block = (stream + global_step) % self._streams
        source_of_row = self._pattern[block, row_of_block]
        rank_in_block = self._rank_in_block[block, row_of_block]
        epochs = np.zeros(len(stream), dtype=np.int64)
        indices = np.zeros(len(stream), dtype=np.int64)
        for source, order in enumerate(self.sources):
            source_rows = np.flatnonzero(source_of_row == source)
            if not len(source_rows):
                continue
            source_stream = stream[source_rows]
            taken = self._taken(source, source_stream, global_step)
            lengths = np.maximum(order.stream_lengths[source_stream], 1)  # `samples` returns -1 for empty streams
            source_epochs, within = np.divmod(taken + rank_in_block[source_rows], lengths)
            epochs[source_rows] = source_epochs
            for source_epoch in np.unique(source_epochs):
                selected = source_epochs == source_epoch
                samples = order.samples(int(source_epoch), source_stream[selected], within[selected])
                indices[source_rows[selected]] = samples
        return epochs, indices

    def taken(self, source: int, stream: int, global_step: int) -> int:
        """Return how many samples the steps before `global_step` take from a stream of a source."""
        return int(self._taken(source, np.array(stream), global_step))

    def _taken(self, source: int, stream: NDArray[np.int64], global_step: int) -> NDArray[np.int64]:
        cycles, remaining_steps = divmod(global_step, self._streams)
        rows_before = self._rows_before_block[source]
        return cycles * self._rows_per_cycle[source] + rows_before[stream + remaining_steps] - rows_before[stream]

    def step_of(self, source: int, stream: int, taken: int) -> int:
        """Return the step that takes sample `taken` (0-based) of a source's stream.

        The source's weight must be above 0.
        """

        def has_taken_more(step: int) -> bool:
            """Return whether the steps up to and including `step` take more than `taken` samples."""
            return self.taken(source, stream, step + 1) > taken

        cycle = taken // int(self._rows_per_cycle[source])  # each cycle of S steps takes the same number of samples
        steps = range(cycle * self._streams, (cycle + 1) * self._streams)
        return steps.start + bisect_left(steps, True, key=has_taken_more)


BatchOrder = GlobalOrder | MixtureOrder


def _spread_sources(shares: NDArray[np.float64], rows: int) -> NDArray[np.int64]:
    """Return the source of each row, (rows,); each source gets a whole number of rows, which are spread evenly."""
    # round the sources' row counts down, then give the missing rows to the sources with the largest remainders
    exact_counts = shares * rows
    counts = np.floor(exact_counts).astype(np.int64)
    by_remainder = np.argsort(counts - exact_counts, kind="stable")
    counts[by_remainder[: rows - counts.sum()]] += 1
    # the rows of each source at evenly spaced positions in (0, 1)
    positions = [(np.arange(count) + 0.5) / max(count, 1) for count in counts]
    sources = np.repeat(np.arange(len(shares)), counts)
    return sources[np.argsort(np.concatenate(positions), kind="stable")]
