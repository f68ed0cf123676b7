"""Closed-form gradient of a weighted sum over pairs, computed block by block from local rows and gathered columns.

All contrastive methods share the feature gradient of

    L = 1/B sum_i [ W1_i g1_i + W2_i g2_i ],   g1_i = 1/(B-1) sum_{j != i} exp(l(s_ij - s_ii) / tau),
                                               g2_i = 1/(B-1) sum_{j != i} exp(l(s_ji - s_ii) / tau)

where the weights W = scale * w are held constant. For l(x) = x, the gradient of L with respect to an image feature is

    dL/de1_i = 1/(B (B-1) tau) [ sum_{j != i} (W1_i a_ij + W2_j b_ij) e2_j - p_i e2_i ],
    a_ij = exp((s_ij - s_ii)/tau),   b_ij = exp((s_ij - s_jj)/tau),   a'_ij = exp((s_ji - s_ii)/tau),
    p_i = sum_{j != i} (W1_i a_ij + W2_i a'_ij)

and the gradient with respect to a text feature is the same with images and texts exchanged. For a different l, the
exponents contain l(x), and a, a' and b are multiplied by l'(x). Ranks exchange features and weights, but not gradients.
"""

from __future__ import annotations

import math
from collections import deque
from functools import cached_property

import torch
from torch import Tensor

from neuclip_ds.objectives.general_pairs import GeneralSimilarities
from neuclip_ds.objectives.pair_arithmetic import exp_
from neuclip_ds.objectives.pair_grid import Block, PairGradient, PairGrid
from neuclip_ds.objectives.pair_loss import PairLoss


class FactoredSimilarities:
    """Similarities with l(x) = x and one temperature: exp((s_ij - s_ii)/tau) = exp(s_ij/tau - c) exp(c - s_ii/tau).

    The first factor is the same for both anchors of a pair and in both passes, so a pair costs one exponential. To keep
    this factor representable, c lowers the largest possible exponent, 1/tau, to `_limit`. If significant terms would
    still underflow, `GeneralSimilarities` is used instead; the host reads the sums to decide this.
    """

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        self._grid, self._pair_loss, self._tau = grid, pair_loss, tau
        self._divisor = grid.size - pair_loss.excluded
        self._kept: deque[Tensor] = deque()  # exponentials of the blocks, for the second pass
        # leaves room for a sum of B terms and for the product with the anchor's factor
        self._limit = 0.8 * math.log(torch.finfo(tau.dtype).max)
        self._tiny = torch.finfo(tau.dtype).tiny
        self._shift = max(1 / float(tau) - self._limit, 0.0)
        self._log_factor = self._shift - grid.positive / tau  # (B,)
        self._total = grid.per_anchor(0.0)
        self._suffices = True

    def log_mean_exp(self) -> Tensor:
        """Return the (2, local) log g of this rank's anchors."""
        for block in self._grid.blocks():
            exponential = self._exponential(block)
            if self._grid.keeps:
                self._kept.append(exponential)
            for anchors, dim in zip(block.local_anchors, (1, 0), strict=False):
                self._total[anchors].add_(exponential.sum(dim))
        log_total = self._total.log()
        self._suffices = bool((log_total > -self._limit).all())
        if self._suffices:
            return log_total + self._log_factor[self._grid.local] - math.log(self._divisor)
        return self._general.log_mean_exp()

    def gradient(self, log_weight: Tensor) -> PairGradient:
        """Return the gradient of L for the (2, B) weights W = exp(log_weight)."""
        grid = self._grid
        log_factor = log_weight - math.log(self._divisor * grid.size) + self._log_factor
        if not self._suffices or not float(log_factor.abs().max()) < 1.1 * self._limit:
            return self._general.gradient(log_weight)
        factor = log_factor.exp().div_(self._tau)  # (2, B)
        (buffer,) = grid.buffers(1)

        def weight(block: Block) -> Tensor:
            exponential = self._kept.popleft() if self._kept else self._exponential(block)
            product = torch.add(*grid.of_anchors(factor, block), out=block.view(buffer)).mul_(exponential)
            return torch.threshold_(product, self._tiny, 0.0)

        grads = grid.gradient(weight)
        pull = factor[:, grid.local] * self._total
        mean_logit = grid.weighted_sum(grads) - (grid.positive[grid.local] * pull).sum()
        grid.add_positives(grads, -pull.sum(dim=0))
        return PairGradient(*grads, mean_logit * grid.size)

    @cached_property
    def _general(self) -> GeneralSimilarities:
        """General similarities, which replace the factored similarities for the rest of the batch."""
        self._kept.clear()
        return GeneralSimilarities(self._grid, self._pair_loss, self._tau)

    def _exponential(self, block: Block) -> Tensor:
        """Return exp(s/tau - c) of a block, with zeros for the positives."""
        exponent = self._grid.similarity(block).div_(self._tau)
        if self._shift:
            exponent.sub_(self._shift)
            # subnormal results become zero, which, unlike exp of `lowest_exponent`, adds nothing to a vanishing sum
            torch.threshold_(exponent, math.log(self._tiny), 2 * math.log(self._tiny))
        exponential = exp_(exponent)
        self._grid.positives(exponential, block).fill_(0.0)
        return exponential


def pair_similarities(grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> FactoredSimilarities | GeneralSimilarities:
    """Return a batch's similarities: factored on a CPU if l(x) = x and all anchors share tau, otherwise general.

    The caller makes two passes over the similarities: `log_mean_exp`, then `gradient`. If the similarities fit
    in the grid's budget, they are stored for the second pass; otherwise, they are recomputed.

    Args:
        grid, pair_loss: the pairs and the pair loss l.
        tau: the temperature, 0-dim if all anchors share it, else (2, B).
    """
    factors = tau.ndim == 0 and pair_loss.is_identity and tau.device.type == "cpu"
    return (FactoredSimilarities if factors else GeneralSimilarities)(grid, pair_loss, tau)
