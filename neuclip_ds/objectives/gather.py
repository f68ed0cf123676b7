"""Gather the features of all ranks, and remove padding rows and undecodable samples before any arithmetic.

The loader knows on the host which rows are valid. The hosts exchange this information while the towers run, so that
shapes are known without waiting for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator, Pending, to_device
from neuclip_ds.errors import UserError


class FeatureGather:
    """All-gather of the features that overlaps the towers' forward passes.

    Rows are added one micro-batch at a time, images and texts separately, in ascending order and in equal numbers on
    all ranks. Each micro-batch is gathered while the towers compute the next micro-batch.
    """

    def __init__(
        self,
        index: Tensor,
        valid: Tensor,
        communicator: Communicator,
        comm_dtype: torch.dtype,
        prefetch: Callable[[Tensor], None] | None = None,
    ) -> None:
        """
        Args:
            index: (b,) int64 global sample indices in host memory; b must be equal on all ranks.
            valid: (b,) bool in host memory, True for valid rows.
            communicator: the ranks to gather from.
            comm_dtype: dtype in which features are sent. Local rows are rounded to this dtype as well, so that all
                ranks see the same numbers and K ranks give the same result as one rank.
            prefetch: called with the (K b,) indices (-1 for invalid rows) when the first features are added.
        """
        self._communicator, self._comm_dtype, self._prefetch = communicator, comm_dtype, prefetch
        self._index = communicator.begin_host_gather(torch.where(valid, index, -1), "features")
        self._texts: list[Pending] = []
        self._images: list[Pending] = []

    @property
    def padded_index(self) -> Tensor:
        """(K b,) indices in host memory, -1 for invalid rows."""
        return self._index.wait()

    def add_text(self, rows: Tensor) -> None:
        """Start gathering the next rows of this rank's (b, d) text features."""
        self._texts.append(self._begin(rows))

    def add_image(self, rows: Tensor) -> None:
        """Start gathering the next rows of this rank's (b, d) image features."""
        self._images.append(self._begin(rows))

    def features(self, dtype: torch.dtype, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Wait for the (K b, d) image and text features in rank order; if `rows` is given, return only those rows."""
        whole = (self._joined(pieces) for pieces in (self._images, self._texts))
        image, text = ((x if rows is None else x.index_select(0, rows)).to(dtype) for x in whole)
        return image, text

    def _begin(self, rows: Tensor) -> Pending:
        pending = self._communicator.begin_all_gather(rows.detach().to(self._comm_dtype), "features")
        if self._prefetch is not None:
            self._prefetch(self.padded_index)
            self._prefetch = None
        return pending

    def _joined(self, pieces: list[Pending]) -> Tensor:
        arrived = [piece.wait() for piece in pieces]
        pieces.clear()
        if len(arrived) == 1:
            return arrived[0]
        ranks = self._communicator.world_size
        return torch.cat([piece.unflatten(0, (ranks, -1)) for piece in arrived], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Features:
    """One rank's rows of the batch: L2-normalized features, global sample indices, and which rows are valid."""

    image: Tensor  # (b, d)
    text: Tensor  # (b, d)
    index: Tensor  # (b,) int64, in host memory
    valid: Tensor  # (b,) bool, in host memory
    gather: FeatureGather | None = None  # gather of these rows, if it began before all of them were computed


class GatheredFeatures:
    """Features of the B valid rows of all ranks, in rank order.

    Attributes:
        image, text: (B, d) features of the whole batch.
        index: (B,) int64 global sample indices, in host memory.
        local: slice of this rank's rows among the B rows.
        padded_index: (K b,) indices in host memory, -1 for invalid rows.
        total: number of valid rows on all ranks: B, or more if this object contains only one rank's rows.
        comm_dtype: dtype in which the rows were sent, and in which they are exactly representable.
    """

    def __init__(
        self,
        features: Features,
        communicator: Communicator,
        comm_dtype: torch.dtype,
        prefetch: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Gather b rows per rank; if `features.gather` is None, create a `FeatureGather` from the other arguments."""
        self._communicator, self.comm_dtype = communicator, comm_dtype
        gather = features.gather
        if gather is None:
            gather = FeatureGather(features.index, features.valid, communicator, comm_dtype, prefetch)
            gather.add_text(features.text)
            gather.add_image(features.image)
        self.padded_index = gather.padded_index
        self._count = len(features.index)
        start = communicator.rank * self._count  # first of this rank's rows among the K b rows
        valid = self.padded_index >= 0
        self._host_rows: Tensor | None = None  # positions of the valid rows among the K b rows, on the host
        self._rows: Tensor | None = None  # the same on the device
        self._own_rows: Tensor | None = None  # positions of the valid rows among this rank's b rows, on the device
        self.index = self.padded_index
        if not bool(valid.all()):  # complete batches, by far the usual case, need no compaction
            self._host_rows = rows = valid.nonzero().squeeze(1)
            self.index = self.padded_index[rows]
            own = rows[self.rows_of(range(communicator.rank, communicator.rank + 1))] - start
            self._rows, self._own_rows = (to_device(x, features.image.device) for x in (rows, own))
        self.local = self.rows_of(range(communicator.rank, communicator.rank + 1))
        self.image, self.text = gather.features(features.image.dtype, self._rows)
        self.total = self.size

    @property
    def size(self) -> int:
        """Number of valid rows, B."""
        return self.index.shape[0]

    @cached_property
    def positive(self) -> Tensor:
        """(B,) s_ii, the similarities of the positive pairs."""
        return torch.bmm(self.image.unsqueeze(1), self.text.unsqueeze(2)).flatten()

    def anchors(self) -> Tensor:
        """Return the (2, local, d) features of this rank's anchors."""
        return torch.stack([self.image[self.local], self.text[self.local]])

    def require_pairs(self, step: int) -> None:
        """Raise `UserError` if fewer than two rows are valid, because no anchor would have a negative."""
        if self.size < 2:
            raise UserError(
                f"Step {step}: only {self.size} of the batch's {len(self.padded_index)} samples can be used, but a "
                "contrastive loss needs two. Read bad_samples.jsonl and fix the shards, or use a larger batch."
            )

    def gather(self, values: Tensor, purpose: str) -> Tensor:
        """Gather the (c, local) values of this rank's valid rows into the (c, B) values of all ranks."""
        padded = self.expand(values.T)
        return self.compact_all(self._communicator.all_gather(padded, purpose)).T.contiguous()

    def rows_of(self, ranks: range) -> slice:
        """Return the slice of the B rows that belongs to the given consecutive ranks."""
        edges = [ranks.start * self._count, ranks.stop * self._count]
        rows = self._host_rows
        return slice(*(edges if rows is None else torch.searchsorted(rows, torch.tensor(edges)).tolist()))

    def sum_local(self, rows: Tensor, ranks: range, purpose: str) -> Tensor:
        """Sum partial rows over `ranks`, and return the (local, ...) sums for this rank's anchors.

        The ranks are consecutive and include this rank; `rows` are this rank's terms for the anchors `rows_of(ranks)`.
        """
        places = None if self._rows is None else self._rows[self.rows_of(ranks)] - ranks.start * self._count
        padded = self._spread(rows, places, len(ranks) * self._count)
        return self.compact(self._communicator.reduce_scatter_among(ranks, padded, purpose))

    def compact_all(self, rows: Tensor) -> Tensor:
        """Select the (B, ...) valid rows from the (K b, ...) rows of all ranks."""
        return rows if self._rows is None else rows.index_select(0, self._rows)

    def compact(self, rows: Tensor) -> Tensor:
        """Select the (local, ...) valid rows from the (b, ...) rows of this rank's batch."""
        return rows if self._own_rows is None else rows.index_select(0, self._own_rows)

    def expand(self, rows: Tensor) -> Tensor:
        """Place (local, ...) valid rows in the (b, ...) rows of this rank's batch; the other rows are zero."""
        return self._spread(rows, self._own_rows, self._count)

    def _spread(self, rows: Tensor, places: Tensor | None, count: int) -> Tensor:
        """Return `count` rows: the given rows at `places`, and zeros elsewhere."""
        if places is None:
            return rows
        return rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, places, rows)
