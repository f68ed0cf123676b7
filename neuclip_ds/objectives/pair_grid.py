"""The pairs of a batch that one rank computes, cut into blocks.

A rank needs only its local rows of S = E1 E2^T and of T = E2 E1^T. Where both the anchor and the partner are local, T
is the transpose of S, so one matrix product gives the blocks of both.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.pair_arithmetic import pair_products, products_exact_for

IMAGE, TEXT = 0, 1

_CPU_BLOCK = 1 << 20  # bytes per thread, so that the block stays in the core's cache after the matmul
# bytes; the host takes longer to launch smaller blocks than the GPU takes to compute them: on an H200, a step of 16,384
# pairs takes 17 ms with these blocks (not compiled) and 71 ms with 16 MiB blocks, although those fit into the L2 cache
_GPU_BLOCK = 1 << 27
# number of pairs, B^2/K, at which compiled kernels save about 1 ms per step, scaled from 7.6 ms for 2^28 pairs in bf16
# on an H200 (tools/measurements/objective_h200.csv)
_FUSED_PAIRS = 1 << 25
KEPT_BYTES = 1_024_000_000
"""Bytes per rank for keeping similarities between the two passes; larger sets of similarities are recomputed."""


def block_bytes(device_type: str) -> int:
    """Return the maximum size in bytes of a block of similarities on a device."""
    return _CPU_BLOCK * torch.get_num_threads() if device_type == "cpu" else _GPU_BLOCK


def fuses(device_type: str, pairs: int) -> bool:
    """Return whether to compile a block's elementwise operations into one kernel: true for many pairs on a GPU."""
    return device_type == "cuda" and pairs >= _FUSED_PAIRS


def slices(start: int, stop: int, size: int) -> list[slice]:
    """Cut the range [start, stop) into slices of at most `size`."""
    return [slice(low, min(low + size, stop)) for low in range(start, stop, size)]


class Block(NamedTuple):
    """A block of the similarity matrix: some of this rank's rows, and some columns from the other modality."""

    side: int  # IMAGE: rows are images and columns are texts; TEXT: vice versa
    rows: slice  # among this rank's rows
    columns: slice  # among the B rows of the batch
    local: slice | None  # the columns among this rank's rows; None if other ranks have them

    @property
    def local_anchors(self) -> list[tuple[int, slice]]:
        """(side, slice) of this rank's anchors in the block: the rows and, if the columns are local, the columns.

        The partners of row anchors are along dimension 1, and the partners of column anchors along dimension 0.
        """
        return [(self.side, self.rows), *([(1 - self.side, self.local)] if self.local is not None else [])]

    def view(self, buffer: Tensor) -> Tensor:
        """Return the start of a flat buffer, viewed in the shape of the block."""
        rows, columns = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return buffer[: rows * columns].view(rows, columns)


class PairGradient(NamedTuple):
    """Gradient of L (pair_gradient.py), and the statistic that the temperature update needs.

    `mean_logit`, of shape (2, local), is W_i/(B-1) sum_j exp(y_ij) y_ij with y_ij = l(s_ij - s_ii)/tau. If all anchors
    share tau, it is this rank's 0-dim contribution to the sum over all 2B anchors, which equals -B tau dL/dtau.
    """

    image: Tensor  # (local, d)
    text: Tensor  # (local, d)
    mean_logit: Tensor


class PairGrid:
    """Features of a batch with B >= 2 valid rows, and the blocks of their similarities.

    Attributes:
        local: slice of this rank's rows among the B rows.
        size: number of valid rows, B.
        positive: (B,) similarities s_ii of the positive pairs.
        keeps: whether the similarities of all blocks fit in the budget.
        fuses: whether a block's elementwise operations are compiled.
    """

    def __init__(self, batch: GatheredFeatures, columns: int | None, budget: float) -> None:
        """Plan blocks of at most `columns` columns; store the similarities if they fit in `budget` bytes."""
        self._features = (batch.image, batch.text)
        self._dtype = batch.comm_dtype
        self.local, self.size = batch.local, batch.size
        self._own = tuple(features[batch.local] for features in self._features)
        self.positive = batch.positive
        self._count = self.local.stop - self.local.start
        itemsize = batch.image.element_size()
        self.keeps = self._count * (2 * self.size - self._count) * itemsize <= budget
        device_type = batch.image.device.type
        self.fuses = fuses(device_type, self._count * self.size)
        elements = block_bytes(device_type) // itemsize
        square = 1 << (elements.bit_length() - 1) // 2  # columns of a block that has at least this many rows
        if self.fuses:
            square *= 2  # code compiled for a square block would work for square blocks only
        self._columns = min(columns or max(square, elements // max(1, self._count)), self.size)
        self._rows = max(1, elements // self._columns)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks: local columns once (image rows), other ranks' columns twice (image rows and text rows)."""
        start, stop = self.local.start, self.local.stop
        for columns in slices(start, stop, self._columns):
            for rows in slices(0, self._count, self._rows):
                yield Block(IMAGE, rows, columns, slice(columns.start - start, columns.stop - start))
        for columns in slices(0, start, self._columns) + slices(stop, self.size, self._columns):
            for side in (IMAGE, TEXT):
                for rows in slices(0, self._count, self._rows):
                    yield Block(side, rows, columns, None)

    def similarity(self, block: Block) -> Tensor:
        """Return the (rows, columns) similarities of a block."""
        rows = self._own[block.side][block.rows]
        return pair_products(rows, self._features[1 - block.side][block.columns], self._dtype)

    def of_anchors(self, values: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Select a block's anchors from (..., 2, B) `values`, as (..., rows, 1) and (..., 1, columns) tensors."""
        rows = values[..., block.side, self.local][..., block.rows].unsqueeze(-1)
        columns = values[..., 1 - block.side, block.columns].unsqueeze(-2)
        # torch.compile would recompile for a view at a different offset in the same memory
        return (rows.clone(), columns.clone()) if self.fuses else (rows, columns)

    def per_anchor(self, value: float) -> Tensor:
        """Return a (2, local) tensor filled with `value`."""
        return self.positive.new_full((2, self._count), value)

    def buffers(self, count: int) -> list[Tensor]:
        """Return flat buffers of a block's size, to be reused for every block so that they stay in a CPU's cache."""
        size = min(self._rows, self._count) * self._columns
        return [self.positive.new_empty(size) for _ in range(count)]

    def positives(self, x: Tensor, block: Block) -> Tensor:
        """Return a view of the elements of a block where the anchor and the partner are the same sample."""
        if block.local is None:
            return x.new_empty(0)
        return x.diagonal(offset=block.rows.start - block.local.start)

    def gradient(self, weight: Callable[[Block], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the feature gradient of a function of the similarities: (local, d) for images and for texts.

        `weight` returns the (rows, columns) derivative of the function with respect to a block's similarities.
        """
        grads = tuple(features.new_zeros((self._count, features.shape[1])) for features in self._features)
        for block in self.blocks():
            grad_similarity = weight(block)
            with products_exact_for(self._dtype):
                grads[block.side][block.rows].addmm_(grad_similarity, self._features[1 - block.side][block.columns])
                if block.local is not None:
                    rows = self._own[block.side][block.rows]
                    grads[1 - block.side][block.local].addmm_(grad_similarity.T, rows)
            del grad_similarity  # frees the memory for the next block
        return grads[IMAGE], grads[TEXT]

    def weighted_sum(self, grads: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sum of derivative times similarity over local images and all texts, from the result of `gradient`.

        Summed over ranks, the result includes each pair once.
        """
        return (self._own[IMAGE] * grads[IMAGE]).sum()

    def add_positives(self, grads: tuple[Tensor, Tensor], by_positive: Tensor) -> None:
        """Add the gradients of a function of the positives s_ii, given its (local,) derivative `by_positive`."""
        for side, grad in enumerate(grads):
            grad.addcmul_(by_positive.unsqueeze(1), self._own[1 - side])
