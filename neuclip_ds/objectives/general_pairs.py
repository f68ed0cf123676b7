"""Gradient of a weighted sum over pairs, for any pair loss and temperatures, with operations that can be fused."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.objectives.pair_arithmetic import log_sum_exp
from neuclip_ds.objectives.pair_grid import Block, PairGradient, PairGrid
from neuclip_ds.objectives.pair_loss import PairLoss

log = logging.getLogger(__name__)

Buffers = Sequence[Tensor | None]  # outputs of operations; None means a new tensor, which fused operations avoid


class GeneralSimilarities:
    """Similarities of a batch for any pair loss and temperatures.

    Each pair costs one exponential for each of its two anchors. Each anchor's sum is computed relative to the largest
    term, and a pair's weight is one exponential of a sum of logarithms, so that no significant term underflows or
    overflows. On a GPU, the host never waits for the device.
    """

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        """Prepare the two passes; `tau` is 0-dim if all anchors share it, else (2, B)."""
        self._divisor = grid.size - pair_loss.excluded
        self._grid, self._pair_loss = grid, pair_loss
        self._tau, self._shared = tau, tau.ndim == 0
        self._kept: deque[Tensor] = deque()
        self._buffers: list[Tensor] = []

    @cached_property
    def _scale(self) -> Tensor:
        return self._tau.pow(1 / self._pair_loss.power).expand(2, self._grid.size)  # divisor of similarities

    @cached_property
    def _origin(self) -> Tensor:
        return (self._grid.positive - self._pair_loss.margin) / self._scale

    @cached_property
    def _sample(self) -> Tensor:
        # row numbers, in the dtype of an anchor's other numbers; exact up to 2^24 rows in float32
        return torch.arange(self._grid.size, device=self._tau.device).to(self._tau.dtype).expand(2, -1)

    def log_mean_exp(self) -> Tensor:
        """Return the (2, local) log g of this rank's anchors."""
        grid = self._grid
        result = grid.per_anchor(-math.inf)
        log_sums = fused(_log_sums) if grid.fuses else _log_sums
        numbers = torch.stack([self._sample, self._scale, self._origin])
        for block in grid.blocks():
            similarity = self._similarity(block)
            if grid.keeps:
                self._kept.append(similarity)
            found = log_sums(self._pair_loss, similarity, self._of_block(numbers, block), self._views(block, 1))
            for anchors, log_sum in zip(block.local_anchors, found, strict=True):
                torch.logaddexp(result[anchors], log_sum, out=result[anchors])
        self._buffers.clear()
        log_sum = result + self._pair_loss.offset(self._origin[:, grid.local])
        return log_sum - math.log(self._divisor)

    def gradient(self, log_weight: Tensor) -> PairGradient:
        """Return the gradient of L for the (2, B) weights W = exp(log_weight)."""
        grid, pair_loss = self._grid, self._pair_loss
        log_share = log_weight - math.log(self._divisor * grid.size)
        # log of the factor on exp(l/tau) l'/power in the derivative with respect to a similarity
        log_factor = log_share + (pair_loss.power / self._scale).log()
        pull, products = grid.per_anchor(0.0), grid.per_anchor(0.0)  # sums of weights, and of weights x similarities
        weights = fused(_weights) if grid.fuses else _weights
        numbers = torch.stack([self._sample, self._scale, self._origin, log_factor])

        def weight(block: Block) -> Tensor:
            similarity = self._kept.popleft() if self._kept else self._similarity(block)
            inputs = pair_loss, similarity, self._of_block(numbers, block), self._views(block, 3)
            total, by_anchor, by_product = weights(*inputs, not self._shared)
            for anchors, sums in zip(block.local_anchors, by_anchor, strict=True):
                pull[anchors].add_(sums)
            for anchors, sums in zip(block.local_anchors, by_product, strict=False):
                products[anchors].add_(sums)
            return total

        grads = grid.gradient(weight)
        # (x + margin) l'(x) = power l(x)
        about_origin = (pair_loss.margin - grid.positive[grid.local]) * pull
        mean_logit = grid.weighted_sum(grads) + about_origin.sum() if self._shared else products + about_origin
        grid.add_positives(grads, -pull.sum(dim=0))
        return PairGradient(*grads, mean_logit / pair_loss.power * grid.size)

    @property
    def _divides(self) -> bool:
        """Whether similarities are divided by the shared scale as soon as they are computed."""
        return self._shared and not self._grid.fuses

    def _similarity(self, block: Block) -> Tensor:
        similarity = self._grid.similarity(block)
        return similarity.div_(self._scale[0, 0]) if self._divides else similarity

    def _of_block(self, numbers: Tensor, block: Block) -> BlockAnchors:
        """Return the anchors of a block with their values from `numbers`, a (count, 2, B) tensor."""
        diagonal = None if self._grid.fuses or block.local is None else block.rows.start - block.local.start
        return BlockAnchors(*self._grid.of_anchors(numbers, block), block.local is not None, diagonal, self._divides)

    def _views(self, block: Block, count: int) -> Buffers:
        """Return block-shaped buffers, which all blocks of a pass share, or Nones if operations are fused."""
        if self._grid.fuses:
            return [None] * count
        if not self._buffers:
            self._buffers.extend(self._grid.buffers(count))
        return [block.view(buffer) for buffer in self._buffers]


class BlockAnchors(NamedTuple):
    """The anchors of a block, in the form that the fused functions take.

    An anchor's numbers are its row, tau^(1/power), the origin (`PairLoss.exponent`) and, in `_weights`, a log factor.
    """

    rows: Tensor  # (numbers, rows, 1)
    columns: Tensor  # (numbers, 1, columns)
    all_local: bool  # whether the columns, like the rows, are this rank's anchors
    diagonal: int | None  # offset of the positives' diagonal; None if there is none or if it is not used
    divided: bool  # whether similarities are already divided

    def exponents(self, similarity: Tensor, scale: Tensor, out: Tensor | None) -> Tensor:
        """Return similarities divided by tau^(1/power), stored in `out`, or the input if it is already divided."""
        return similarity if self.divided else torch.div(similarity, scale, out=out)

    def negatives(self, x: Tensor, value: float) -> Tensor:
        """Return x with the positives replaced by `value`; x is overwritten if the positives' diagonal is known."""
        if self.diagonal is not None:
            x.diagonal(self.diagonal).fill_(value)
        elif self.all_local:
            return x.masked_fill(self.rows[0] == self.columns[0], value)
        return x


def _log_sums(pair_loss: PairLoss, similarity: Tensor, block: BlockAnchors, buffers: Buffers) -> list[Tensor]:
    """Return the logsumexp over each local anchor's negatives in a block: for the rows, then for any local columns.

    `buffers` contains one tensor in the shape of the block, which is overwritten, or None.
    """
    (out,) = buffers
    found = []
    for dim, anchors in ((1, block.rows), (0, block.columns))[: 1 + block.all_local]:
        _, scale, origin = anchors
        exponent = pair_loss.exponent(block.exponents(similarity, scale, out), origin, out)
        found.append(log_sum_exp(block.negatives(exponent, -math.inf), dim, out))
    return found


def _weights(
    pair_loss: PairLoss, similarity: Tensor, block: BlockAnchors, buffers: Buffers, with_products: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the derivative of L with respect to a block's similarities, and sums over the local anchors' negatives.

    The sums are of the weights and, if `with_products`, of the weights times the similarities. `buffers` contains three
    tensors, which are overwritten, or three Nones.
    """
    *outs, other = buffers
    parts, pulls, products = [], [], []
    for (dim, anchors), out in zip(((1, block.rows), (0, block.columns)), outs, strict=True):
        _, scale, origin, log_factor = anchors
        y = block.exponents(similarity, scale, out)
        part = block.negatives(pair_loss.weight(y, origin, log_factor, out, other), 0.0)
        parts.append(part)
        if dim or block.all_local:
            pulls.append(part.sum(dim))
            if with_products:
                products.append(torch.mul(part, similarity, out=other).sum(dim))
    return parts[0].add_(parts[1]), pulls, products


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with torch.compile for tensors of any size; if that fails, call the function directly.

    The function must leave its arguments unchanged.
    """
    present = torch.compile(function, dynamic=True)

    def call(*arguments: Any) -> Any:
        nonlocal present
        try:
            return present(*arguments)
        except Exception as error:  # the compiler's exceptions differ between versions
            if present is function:
                raise
            log.warning("The objective runs slower, since torch.compile fails: %s", str(error).partition("\n")[0])
            present = function
            return call(*arguments)

    return call
