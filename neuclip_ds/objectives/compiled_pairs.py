"""`GeneralPairs` with the operations between its matrix products fused by torch.compile.

What follows a product reads and writes a block of similarities several times, which takes a GPU longer than the product
itself; fused, each visit reads the block once.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.objectives.contrastive import BlockWeights, GeneralPairs
from neuclip_ds.objectives.exponents import log_sum_exp
from neuclip_ds.objectives.pair_grid import Block
from neuclip_ds.objectives.pair_loss import PairLoss

Numbers = tuple[Tensor, ...]  # a number of each anchor: of a block's rows (rows, 1), then of its columns (1, columns)


class CompiledPairs(GeneralPairs):
    """Any pair loss and temperatures, compiled once for local blocks and once for those of other ranks."""

    def _log_sums(self, similarity: Tensor, block: Block) -> list[Tensor]:
        origins, scales = (self._grid.of_anchors(values, block) for values in (self._origin, self._scale))
        local = len(block.local_anchors)
        same = self._same_sample(block)
        return _compiled(_log_sums)(self._pair_loss, self._shared, similarity, same, origins[:local], scales[:local])

    def _weights(self, similarity: Tensor, block: Block, log_factor: Tensor) -> BlockWeights:
        by_block = [self._grid.of_anchors(values, block) for values in (self._origin, self._scale, log_factor)]
        local = len(block.local_anchors)
        return BlockWeights(
            *_compiled(_weights)(self._pair_loss, self._shared, similarity, self._same_sample(block), *by_block, local)
        )

    def _same_sample(self, block: Block) -> Numbers:
        """Return numbers that are equal where anchor and partner are one sample; empty where none can be."""
        if block.local is None:
            return ()
        device = self._grid.positive.device
        rows = torch.arange(block.rows.start, block.rows.stop, device=device)
        columns = torch.arange(block.local.start, block.local.stop, device=device)
        return rows.unsqueeze(1), columns.unsqueeze(0)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)  # for blocks of any size


def _log_sums(
    pair_loss: PairLoss, shared: bool, similarity: Tensor, same: Numbers, origins: Numbers, scales: Numbers
) -> list[Tensor]:
    """`GeneralPairs._log_sums` of the given anchors; `shared` similarities are scaled already."""
    found = []
    for dim, origin, scale in zip((1, 0), origins, scales, strict=False):
        scaled = similarity if shared else similarity / scale
        exponent = pair_loss.exponent(scaled, origin, torch.empty_like(scaled))
        if same:
            exponent = exponent.masked_fill(same[0] == same[1], -math.inf)
        found.append(log_sum_exp(exponent, dim, torch.empty_like(exponent)))
    return found


def _weights(
    pair_loss: PairLoss,
    shared: bool,
    similarity: Tensor,
    same: Numbers,
    origins: Numbers,
    scales: Numbers,
    log_factors: Numbers,
    local: int,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """`GeneralPairs._weights`, with the sums of the first `local` kinds of anchors."""
    total = torch.zeros_like(similarity)
    pulls: list[Tensor] = []
    products: list[Tensor] = []
    for dim, origin, scale, log_factor in zip((1, 0), origins, scales, log_factors, strict=True):
        scaled = similarity if shared else similarity / scale
        part = pair_loss.weight(scaled, origin, log_factor, torch.empty_like(scaled), torch.empty_like(scaled))
        if same:
            part = part.masked_fill(same[0] == same[1], 0.0)
        total = total + part
        if len(pulls) < local:
            pulls.append(part.sum(dim))
            if not shared:
                products.append((part * similarity).sum(dim))
    return total, pulls, products
