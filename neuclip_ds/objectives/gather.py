"""The features of all ranks, with empty and undecodable rows taken out before any arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator


@dataclass(frozen=True)
class Features:
    """One rank's share of the batch: L2-normalised float rows, their global sample index, and whether they count."""

    image: Tensor  # (b, d)
    text: Tensor  # (b, d)
    index: Tensor  # (b,) int64
    valid: Tensor  # (b,) bool


class GatheredFeatures:
    """The B valid rows of all ranks in rank order.

    Attributes:
        image, text: (B, d) rows of the whole batch.
        index: (B,) int64 global sample indices.
        own: which of the B rows are this rank's.
        padded_index: (K b,) indices with -1 for rows that do not count, as the sample store reads them.
    """

    def __init__(self, features: Features, communicator: Communicator, wire: torch.dtype) -> None:
        """
        Args:
            features: this rank's rows; b must be equal on all ranks.
            wire: precision in which features travel. The rank's own rows are rounded to it as well, so that all ranks
                see the same numbers and K ranks compute what one would.
        """
        dtype = features.image.dtype
        self._communicator = communicator
        self._rows = features.index.shape[0]
        marked = torch.where(features.valid, features.index, -1)
        self.padded_index = communicator.all_gather(marked, "features")
        image = communicator.all_gather(features.image.to(wire), "features").to(dtype)
        text = communicator.all_gather(features.text.to(wire), "features").to(dtype)
        valid = self.padded_index >= 0
        start = communicator.rank * self._rows
        # one look at the host's side: whole batches, by far the usual case, then need no compaction
        self._valid = None if bool(valid.all()) else valid
        if self._valid is None:
            self.own = slice(start, start + self._rows)
            self.index, self.image, self.text = self.padded_index, image, text
            return
        before, own = int(valid[:start].sum()), int(valid[start : start + self._rows].sum())
        self.own = slice(before, before + own)
        self.index, self.image, self.text = self.padded_index[valid], image[valid], text[valid]

    @property
    def size(self) -> int:
        """B, the number of rows that count."""
        return self.index.shape[0]

    def gather(self, values: Tensor, purpose: str) -> Tensor:
        """(c, own) values of this rank's valid rows -> (c, B) of all ranks'."""
        padded = self.expand(values.T)
        gathered = self._communicator.all_gather(padded, purpose)
        return (gathered if self._valid is None else gathered[self._valid]).T.contiguous()

    def sum_own(self, rows: Tensor, purpose: str) -> Tensor:
        """(B, ...) partial rows of every rank -> (own, ...): this rank's rows of their sum over ranks."""
        if self._valid is not None:
            padded = rows.new_zeros((self._valid.shape[0], *rows.shape[1:]))
            padded[self._valid] = rows
            rows = padded
        return self.compact(self._communicator.reduce_scatter(rows, purpose))

    def compact(self, rows: Tensor) -> Tensor:
        """(b, ...) rows of this rank's batch -> (own, ...) the valid ones."""
        return rows if self._valid is None else rows[self._own_valid()]

    def expand(self, rows: Tensor) -> Tensor:
        """(own, ...) valid rows -> (b, ...) rows of this rank's batch, zeros where a row does not count."""
        if self._valid is None:
            return rows
        padded = rows.new_zeros((self._rows, *rows.shape[1:]))
        padded[self._own_valid()] = rows
        return padded

    def _own_valid(self) -> Tensor:
        start = self._communicator.rank * self._rows
        assert self._valid is not None
        return self._valid[start : start + self._rows]
