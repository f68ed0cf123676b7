"""Gather the features of all ranks, and remove padding rows and undecodable samples before any arithmetic.

The loader knows on the host which rows are valid. The hosts exchange this information while the towers run, so that
shapes are known without waiting for the device.

In each step, all ranks make these calls in the same order. A call of the loss without `begin` makes them itself
(`ContrastiveLoss._send`).

    pending = loss_fn.begin(index, valid)     starts sending the indices, from host memory to host memory
    pending.add_text(rows), .add_image(rows)  start sending features, once for each micro-batch of a tower
    pending.begin_reads()                     waits for the indices, and starts reading the samples' statistics
    loss_fn(image, text, pending=pending)     calls `pending.gathered`, which waits for the features of all ranks, and
                                              then the method's function, which waits for the statistics

If the step does not need the features of other ranks (`LossFunction.gathers`), and every rank has at least two valid
rows, the ranks only exchange their numbers of valid rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator, Pending, to_device
from neuclip_ds.errors import UserError
from neuclip_ds.losses.eager import not_compiled
from neuclip_ds.losses.stored_features import REFERENCE, TEACHER, GatheredStored, StoredRows, minus_reference

if TYPE_CHECKING:
    from neuclip_ds.losses.base import Position

BeginReads = Callable[[Tensor], Mapping[str, Pending]]
"""Function that starts reading the statistics of samples, given their (K b,) indices; see `Stateful.begin_reads`."""


def all_valid(rows: int) -> Tensor:
    """Return a mask in host memory that marks all rows of a batch as valid."""
    return torch.ones(rows, dtype=torch.bool, device="cpu")


class PendingBatch:
    """A batch whose indices, features and statistics are being sent between the ranks.

    `ContrastiveLoss.begin` creates it and sends the indices. The caller then passes features as soon as a tower has
    computed them, one micro-batch at a time, so that sending them overlaps the towers' computation. Once the towers
    have been launched, the caller calls `begin_reads`. All ranks must call the methods in the same order, with equal
    numbers of rows.
    """

    def __init__(
        self,
        *,
        index: Tensor,
        valid: Tensor,
        position: Position,
        communicator: Communicator,
        comm_dtype: torch.dtype | None,
        begin_reads: BeginReads | None,
        sends_features: bool = True,
        training: bool = True,
        uses_stored: Collection[str] = (REFERENCE, TEACHER),
    ) -> None:
        """
        Args:
            index: (b,) int64 global sample indices in host memory; b must be equal on all ranks.
            valid: (b,) bool in host memory, True for valid rows.
            position: position of the step in the training run.
            communicator: communicator between the ranks whose rows are gathered.
            comm_dtype: dtype in which features are sent, by default the dtype of the features. Local rows are rounded
                to this dtype as well, so that all ranks see the same numbers and K ranks give the same result as one
                rank.
            begin_reads: function that starts reading the samples' statistics; None if the loss has none.
            sends_features: whether the step needs the features of all ranks.
            training: whether the step updates the state of the loss.
            uses_stored: names of the stored features that the loss can use: `reference`, `teacher`.
        """
        self.rows = len(index)
        self.position = position
        self.training = training
        self._communicator = communicator
        self._comm_dtype = comm_dtype
        self._start_reads = begin_reads
        self._sends_features = sends_features  # becomes True in `gathered` if a rank has too few valid rows
        self._uses_stored = uses_stored
        self._local_index = torch.where(valid, index, -1)
        self._index = Pending(self._local_index)  # this rank's indices or, if features are sent, those of all ranks
        self._valid_counts: Pending | None = None  # one count per rank; exchanged only if features are not sent
        self._images: list[Pending] = []
        self._texts: list[Pending] = []
        self._image_rows = 0  # of this rank, added so far
        self._text_rows = 0
        self._stored: dict[str, list[tuple[Pending, Pending]]] = {REFERENCE: [], TEACHER: []}
        self._statistics: Mapping[str, Pending] | None = None
        if sends_features:
            self._index = communicator.begin_host_gather(self._local_index, "features")
        else:
            self._valid_counts = communicator.begin_host_gather(valid.sum().view(1), "features")

    @not_compiled
    def add_text(self, rows: Tensor) -> None:
        """Start sending the next rows of this rank's (b, d) text features."""
        self._texts.append(self._begin_gather(rows))
        self._text_rows += len(rows)

    @not_compiled
    def add_image(self, rows: Tensor) -> None:
        """Start sending the next rows of this rank's (b, d) image features."""
        self._images.append(self._begin_gather(rows))
        self._image_rows += len(rows)

    def add_stored(self, name: str, image: Tensor, text: Tensor) -> None:
        """Start sending this rank's stored features: all rows in one call, not in micro-batches.

        Args:
            name: whose features these are, `reference` or `teacher`. For an ensemble, call this once for each teacher,
                in the order of `distill.temperature`.
            image, text: (b, D) normalized rows on any device, in the order of `index`. Like the features, they are
                gathered from all ranks in the dtype that `comm_dtype` selects.

        Raises:
            ValueError: the loss cannot use these features, or the shapes do not match.
        """
        if name not in self._uses_stored:
            usable = " or ".join(sorted(self._uses_stored)) or "none"
            raise ValueError(
                f"The loss cannot use stored features of {name!r}: omit them, or pass features that it can use "
                f"({usable})."
            )
        if image.ndim != 2 or image.shape != text.shape or len(image) != self.rows:
            raise ValueError(
                f"The features of the {name} have shapes {tuple(image.shape)} (images) and {tuple(text.shape)} "
                f"(texts): pass two tensors of shape ({self.rows}, D)."
            )
        device = self._communicator.device
        images = self._begin_gather(to_device(image, device), "stored_features")
        texts = self._begin_gather(to_device(text, device), "stored_features")
        self._stored[name].append((images, texts))

    @not_compiled
    def begin_reads(self) -> None:
        """Start reading the samples' statistics, if the loss has any; the host waits for the indices of all ranks.

        Call this at a fixed point of the program, when the towers have been launched. If ranks started reads whenever
        the indices had arrived, they would run the collectives in different orders.
        """
        if self._sends_features and self._start_reads is not None and self._statistics is None:
            self._statistics = self._start_reads(self._index.wait())

    def gathered(self, dtype: torch.dtype) -> GatheredFeatures:
        """Wait for the features, and return the features of all ranks' valid rows.

        If the step does not need the features of other ranks, only this rank's rows are returned, except if a rank has
        fewer than two valid rows: it would have no negatives, so all ranks gather.

        Raises `RuntimeError` unless the features of every row have been added exactly once.
        """
        rows = len(self._local_index)
        if self._text_rows != rows or self._image_rows != rows:
            raise RuntimeError(
                f"The batch has {rows} rows, but add_text() has received {self._text_rows} rows and add_image() "
                f"{self._image_rows}: add the features of every row once before you call the loss."
            )
        if self._valid_counts is not None:
            counts = self._valid_counts.wait()
            if int(counts.min()) > 1:
                return self._features_of(self._communicator.single_rank(), dtype, total=int(counts.sum()))
            self._send_kept_rows()
        self.begin_reads()
        return self._features_of(self._communicator, dtype, total=None)

    def _send_kept_rows(self) -> None:
        """Start sending the indices and features that this rank has not sent so far."""
        self._sends_features = True
        self._index = self._communicator.begin_host_gather(self._local_index, "features")
        self._texts = [self._begin_gather(piece.wait()) for piece in self._texts]
        self._images = [self._begin_gather(piece.wait()) for piece in self._images]
        for name, pairs in self._stored.items():
            sent: list[tuple[Pending, Pending]] = []
            for kept_images, kept_texts in pairs:
                images = self._begin_gather(kept_images.wait(), "stored_features")
                texts = self._begin_gather(kept_texts.wait(), "stored_features")
                sent.append((images, texts))
            self._stored[name] = sent

    def _begin_gather(self, rows: Tensor, purpose: str = "features") -> Pending:
        # docs: gather
        sent = rows.detach().to(self._comm_dtype or rows.dtype)
        if not self._sends_features:
            return Pending(sent)
        return self._communicator.begin_all_gather(sent, purpose)
        # docs: end

    def _features_of(self, communicator: Communicator, dtype: torch.dtype, total: int | None) -> GatheredFeatures:
        padded_index = self._index.wait()
        image = self._in_rank_order(self._images, communicator.world_size)
        text = self._in_rank_order(self._texts, communicator.world_size)
        stored: dict[str, list[StoredRows]] = {}
        for name, pairs in self._stored.items():
            stored[name] = [(images.wait(), texts.wait()) for images, texts in pairs]
        return GatheredFeatures(
            padded_image=image,
            padded_text=text,
            padded_index=padded_index,
            communicator=communicator,
            dtype=dtype,
            statistics=self._statistics or {},
            padded_stored=stored,
            total=total,
        )

    def _in_rank_order(self, pieces: list[Pending], world_size: int) -> Tensor:
        """Wait for the pieces of all micro-batches, and return (K b, d) rows, with each rank's rows together."""
        arrived = [piece.wait() for piece in pieces]
        pieces.clear()
        if len(arrived) == 1:
            return arrived[0]
        by_rank = [piece.unflatten(0, (world_size, -1)) for piece in arrived]
        return torch.cat(by_rank, dim=1).flatten(0, 1)


class GatheredFeatures:
    """Features of the B valid rows of all ranks, in rank order; in a step without a gather, of this rank's valid rows.

    Attributes:
        image, text: (B, d) features of these rows.
        index: (B,) int64 global sample indices, in host memory.
        local: slice of this rank's rows among the B rows.
        padded_index: (K b,) indices in host memory, -1 for invalid rows.
        width: number d of columns that receive gradients; the columns of a reference model may follow them.
        size: number of valid rows, B.
        total: number of valid rows on all ranks: B, or more if this object contains only one rank's rows.
        comm_dtype: dtype in which the rows are exactly representable, such as the dtype in which they were sent.
        statistics: reads of the samples' statistics, by name (`Stateful.begin_reads`).
        reference: stored features of the reference model; None without one.
        teachers: stored features of each teacher; empty without distillation.
    """

    def __init__(
        self,
        *,
        padded_image: Tensor,
        padded_text: Tensor,
        padded_index: Tensor,
        communicator: Communicator,
        dtype: torch.dtype,
        statistics: Mapping[str, Pending],
        padded_stored: Mapping[str, Sequence[StoredRows]] | None = None,
        total: int | None = None,
    ) -> None:
        """Select the valid rows.

        Args:
            padded_image, padded_text: (K b, d) features of all ranks, including invalid rows.
            padded_index: see the attribute.
            communicator: communicator between the ranks that sent the rows.
            dtype: dtype of the attributes `image` and `text`.
            statistics: see the attribute.
            padded_stored: (K b, D) stored features of images and texts of all ranks, including invalid rows, by name.
            total: see the attribute; by default B.
        """
        self._communicator = communicator
        self.comm_dtype = torch.promote_types(padded_image.dtype, padded_text.dtype)
        self.padded_index = padded_index
        self.statistics = statistics
        self._rows_per_rank = len(padded_index) // communicator.world_size
        self._this_rank = range(communicator.rank, communicator.rank + 1)
        self.index = padded_index
        # positions of the valid rows: among the K b rows, on the host and on the device, and among this rank's b rows,
        # on the device; None if all rows are valid
        self._host_rows: Tensor | None = None
        self._rows: Tensor | None = None
        self._local_rows: Tensor | None = None
        valid = padded_index >= 0
        if not bool(valid.all()):  # complete batches, by far the usual case, need no compaction
            self._host_rows = valid.nonzero().squeeze(1)
            self.index = padded_index[self._host_rows]
            start = communicator.rank * self._rows_per_rank
            local_rows = self._host_rows[self.rows_of(self._this_rank)] - start
            self._rows = to_device(self._host_rows, padded_image.device)
            self._local_rows = to_device(local_rows, padded_image.device)
        self.size = len(self.index)
        self.total = self.size if total is None else total
        self.local = self.rows_of(self._this_rank)
        self.image = self.compact_all(padded_image).to(dtype)
        self.text = self.compact_all(padded_text).to(dtype)
        self.width = self.image.shape[1]
        stored = padded_stored or {}
        references = self._stored_features(stored.get(REFERENCE, ()), dtype)
        self.reference = references[0] if references else None
        self.teachers = self._stored_features(stored.get(TEACHER, ()), dtype)

    @cached_property
    def positive(self) -> Tensor:
        """(B,) s_ii, the similarities of the positive pairs."""
        return torch.bmm(self.image.unsqueeze(1), self.text.unsqueeze(2)).flatten()

    @property
    def has_reference_columns(self) -> bool:
        """Whether the features include a reference model's features; see `minus_reference`."""
        return self.image.shape[1] > self.width

    def minus_reference(self) -> GatheredFeatures:
        """Return this batch with features whose similarities are s_ij - r_ij, or unchanged without a reference model.

        The features are the result of `stored_features.minus_reference`, of width d + D.
        """
        reference = self.reference
        if reference is None:
            return self
        image, text = minus_reference((self.image, self.text), (reference.image, reference.text))
        return self._with(
            image=image,
            text=text,
            comm_dtype=torch.promote_types(self.comm_dtype, reference.comm_dtype),
            width=self.width,
            statistics=self.statistics,
        )

    def with_features(self, other: GatheredStored, statistics: Mapping[str, Pending] | None = None) -> GatheredFeatures:
        """Return the same rows with other features and, if given, other reads of the samples' statistics."""
        return self._with(
            image=other.image,
            text=other.text,
            comm_dtype=other.comm_dtype,
            width=other.image.shape[1],
            statistics=self.statistics if statistics is None else statistics,
        )

    def _with(
        self,
        *,
        image: Tensor,
        text: Tensor,
        comm_dtype: torch.dtype,
        width: int,
        statistics: Mapping[str, Pending],
    ) -> GatheredFeatures:
        batch = copy.copy(self)
        batch.image = image
        batch.text = text
        batch.comm_dtype = comm_dtype
        batch.width = width
        batch.statistics = statistics
        batch.__dict__.pop("positive", None)  # computed from the features that were replaced
        return batch

    def anchors(self) -> Tensor:
        """Return the (2, local, d) features of this rank's anchors."""
        return torch.stack([self.image[self.local], self.text[self.local]])

    def require_pairs(self, step: int) -> None:
        """Raise `UserError` if fewer than two rows are valid, because no anchor would have a negative."""
        if self.size < 2:
            raise UserError(
                f"Step {step + 1}: only {self.size} of the batch's {len(self.padded_index)} samples can be used, but a "
                "contrastive loss needs two. In a run, warnings in the log name unusable samples and causes: fix the "
                "shards. In your own training loop, pass batches with at least two valid rows."
            )

    def gather(self, values: Tensor, purpose: str) -> Tensor:
        """Gather the (c, local) values of this rank's valid rows into the (c, B) values of all ranks."""
        padded = self.expand(values.T)
        return self.compact_all(self._communicator.all_gather(padded, purpose)).T.contiguous()

    def minus_mean(self, rows: Tensor, purpose: str) -> Tensor:
        """Return this rank's (2, local, d) rows minus, for each modality, their mean over the anchors of all ranks."""
        total = self._communicator.all_reduce(rows.sum(dim=1, keepdim=True), purpose)
        return rows - total / self.size

    def rows_of(self, ranks: range) -> slice:
        """Return the slice of the B rows that belongs to the given consecutive ranks."""
        start = ranks.start * self._rows_per_rank
        stop = ranks.stop * self._rows_per_rank
        if self._host_rows is None:
            return slice(start, stop)
        first, end = torch.searchsorted(self._host_rows, torch.tensor([start, stop], device="cpu")).tolist()
        return slice(first, end)

    def sum_local(self, rows: Tensor, ranks: range, purpose: str) -> Tensor:
        """Sum partial rows over `ranks`, and return the (local, ...) sums for this rank's anchors.

        The ranks are consecutive and include this rank; `rows` are this rank's terms for the anchors in
        `rows_of(ranks)`.
        """
        positions = None
        if self._rows is not None:
            positions = self._rows[self.rows_of(ranks)] - ranks.start * self._rows_per_rank
        padded = _spread(rows, positions, len(ranks) * self._rows_per_rank)
        return self.compact(self._communicator.reduce_scatter_among(ranks, padded, purpose))

    def _stored_features(self, padded: Sequence[StoredRows], dtype: torch.dtype) -> list[GatheredStored]:
        """Select the valid rows of stored features."""
        features: list[GatheredStored] = []
        for padded_image, padded_text in padded:
            image = self.compact_all(padded_image).to(dtype)
            text = self.compact_all(padded_text).to(dtype)
            comm_dtype = torch.promote_types(padded_image.dtype, padded_text.dtype)
            features.append(GatheredStored(image=image, text=text, comm_dtype=comm_dtype))
        return features

    def compact_all(self, rows: Tensor) -> Tensor:
        """Select the (B, ...) valid rows from the (K b, ...) rows of all ranks."""
        return rows if self._rows is None else rows.index_select(0, self._rows)

    def compact(self, rows: Tensor) -> Tensor:
        """Select the (local, ...) valid rows from the (b, ...) rows of this rank's batch."""
        return rows if self._local_rows is None else rows.index_select(0, self._local_rows)

    def expand(self, rows: Tensor) -> Tensor:
        """Place (local, ...) valid rows in the (b, ...) rows of this rank's batch; the other rows are zero."""
        return _spread(rows, self._local_rows, self._rows_per_rank)


def _spread(rows: Tensor, positions: Tensor | None, count: int) -> Tensor:
    """Return `count` rows: the given rows at `positions`, and zeros elsewhere."""
    if positions is None:
        return rows
    return rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, positions, rows)
