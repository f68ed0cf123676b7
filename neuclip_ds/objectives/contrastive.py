"""The weighted-pair gradient in closed form: this rank's rows against gathered columns, block by block.

Every contrastive method has the feature gradient of

    L = 1/B sum_i [ W1_i g1_i + W2_i g2_i ],   g1_i = 1/(B-1) sum_{j != i} exp(l(s_ij - s_ii) / tau),
                                               g2_i = 1/(B-1) sum_{j != i} exp(l(s_ji - s_ii) / tau)

with the weights W = scale w held constant. For l(x) = x its gradient by an image feature is

    dL/de1_i = 1/(B (B-1) tau) [ sum_{j != i} (W1_i a_ij + W2_j b_ij) e2_j - p_i e2_i ],
    a_ij = exp((s_ij - s_ii)/tau),   b_ij = exp((s_ij - s_jj)/tau),   a'_ij = exp((s_ji - s_ii)/tau),
    p_i = sum_{j != i} (W1_i a_ij + W2_i a'_ij)

and by a text feature the same with the roles exchanged. Another l brings its slope l'(x) into a, a' and b. A rank needs
the gathered features and weights only: no gradient travels between ranks.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.objectives.exponents import lowest_exponent
from neuclip_ds.objectives.pair_grid import Block, PairGrid
from neuclip_ds.objectives.pair_loss import PairLoss


class PairGradient(NamedTuple):
    """Gradient of L and what the temperature needs."""

    image: Tensor  # (local, d)
    text: Tensor  # (local, d)
    mean_logit: Tensor  # (2, local): W_i/(B-1) sum_j exp(y_ij) y_ij with y_ij = l(x_ij)/tau; -tau dL/dtau is its mean


class PairSimilarities:
    """The similarities of one batch, visited twice: for the log-mean-exps, then for the gradient.

    Between the visits they are kept if they fit into the grid's budget, and computed again if not, so that memory is
    O(local rows x block) + budget.
    """

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        """`tau` is 0-dim if all anchors share it, else (2, B)."""
        self.divisor = pair_loss.divisor(grid.size)
        self._grid, self._pair_loss, self._tau = grid, pair_loss, tau
        factors = tau.ndim == 0 and pair_loss.is_identity
        self._pairs: _FactoredPairs | _GeneralPairs = _FactoredPairs(grid, tau) if factors else self._general()

    def log_mean_exp(self) -> Tensor:
        """(2, local): log g of this rank's anchors."""
        log_sum = self._pairs.log_sum_exp()
        if log_sum is None:
            self._pairs = self._general()
            log_sum = self._pairs.log_sum_exp()
        return log_sum - math.log(self.divisor)

    def gradient(self, log_weight: Tensor) -> PairGradient:
        """Gradient of L for weights W = exp(log_weight), (2, B); after `log_mean_exp`, and once."""
        log_share = log_weight - math.log(self.divisor * self._grid.size)
        gradient = self._pairs.gradient(log_share)
        if gradient is None:
            gradient = self._general().gradient(log_share)
        return gradient._replace(mean_logit=gradient.mean_logit * self._grid.size)

    def _general(self) -> _GeneralPairs:
        return _GeneralPairs(self._grid, self._pair_loss, self._tau.expand(2, self._grid.size))


class _GeneralPairs:
    """Any pair loss and temperatures: each pair has an exponential for either of its anchors."""

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        self._grid, self._pair_loss = grid, pair_loss
        self._inverse_tau = tau.reciprocal()
        self._positive = grid.positive.expand(2, -1)
        self._lowest = lowest_exponent(tau.dtype)
        self._kept: deque[Tensor] = deque()

    def log_sum_exp(self) -> Tensor:
        result = self._grid.per_anchor(-math.inf)
        for block in self._grid.blocks():
            similarity = self._grid.similarity(block)
            if self._grid.keeps:
                self._kept.append(similarity)
            _, logit = self._logits(similarity, block)
            self._grid.positives(logit[0], block).fill_(-math.inf)
            row_sums = result[block.side, block.rows]
            row_sums.copy_(torch.logaddexp(row_sums, self._log_sum(logit[0], 1)))
            if block.local is not None:
                self._grid.positives(logit[1], block).fill_(-math.inf)
                column_sums = result[1 - block.side, block.local]
                column_sums.copy_(torch.logaddexp(column_sums, self._log_sum(logit[1], 0)))
        return result

    def gradient(self, log_share: Tensor) -> PairGradient:
        pull, mean_logit = self._grid.per_anchor(0.0), self._grid.per_anchor(0.0)

        def weight(block: Block) -> Tensor:
            similarity = self._kept.popleft() if self._kept else self._grid.similarity(block)
            differences, logits = self._logits(similarity, block)
            total = torch.zeros_like(similarity)
            anchors = zip(
                differences,
                logits,
                self._grid.anchors(log_share, block),
                self._grid.anchors(self._inverse_tau, block),
                ((block.side, block.rows, 1), (1 - block.side, block.local, 0)),
                strict=True,
            )
            for difference, logit, share, inverse_tau, (side, where, dim) in anchors:
                part = (logit + share).clamp_(min=self._lowest).exp_()
                self._grid.positives(part, block).fill_(0.0)
                if where is not None:
                    mean_logit[side, where] += (logit.mul_(part)).sum(dim)
                slope = self._pair_loss.slope(difference)
                part.mul_(inverse_tau if slope is None else slope.mul_(inverse_tau))
                if where is not None:
                    pull[side, where] += part.sum(dim)
                total += part
            return total

        grads = self._grid.gradient(weight)
        self._grid.add_positives(grads, -pull.sum(dim=0))
        return PairGradient(*grads, mean_logit)

    def _log_sum(self, logit: Tensor, dim: int) -> Tensor:
        """Return logsumexp along a dimension; overwrites `logit`."""
        return logit.clamp_(min=logit.amax(dim, keepdim=True) + self._lowest).logsumexp(dim)

    def _logits(self, similarity: Tensor, block: Block) -> tuple[list[Tensor], list[Tensor]]:
        """x = s - s_ii and l(x)/tau for the block's row anchors and for its column anchors."""
        differences = [similarity - positive for positive in self._grid.anchors(self._positive, block)]
        inverse_taus = self._grid.anchors(self._inverse_tau, block)
        logits = [self._pair_loss.value_(x.clone()).mul_(t) for x, t in zip(differences, inverse_taus, strict=True)]
        return differences, logits


class _FactoredPairs:
    """l(x) = x and one temperature: exp((s_ij - s_ii)/tau) = exp(s_ij/tau - c) exp(c - s_ii/tau).

    The first factor is the same for both anchors of a pair and for both visits, so a pair costs one exponential.
    It must be representable: c moves the largest possible exponent 1/tau down to `_limit`, and where what counts
    would vanish below all the same, the answer is None.
    """

    def __init__(self, grid: PairGrid, tau: Tensor) -> None:
        self._grid, self._tau = grid, tau
        # a sum of B terms, and a product with the anchor's factor, have room beyond it
        self._limit = 0.8 * math.log(torch.finfo(tau.dtype).max)
        self._tiny = torch.finfo(tau.dtype).tiny
        self._shift = (tau.reciprocal() - self._limit).clamp(min=0)
        self._log_factor = self._shift - grid.positive / tau  # (B,)
        self._total, self._moment = grid.per_anchor(0.0), grid.per_anchor(0.0)
        self._kept: deque[Tensor] = deque()

    def log_sum_exp(self) -> Tensor | None:
        for block in self._grid.blocks():
            exponent, exponential = self._exponential(block)
            if self._grid.keeps:
                self._kept.append(exponential)
            self._total[block.side, block.rows] += exponential.sum(dim=1)
            moment = exponent.mul_(exponential)
            self._moment[block.side, block.rows] += moment.sum(dim=1)
            if block.local is not None:
                self._total[1 - block.side, block.local] += exponential.sum(dim=0)
                self._moment[1 - block.side, block.local] += moment.sum(dim=0)
        log_total = self._total.log()
        if not bool((log_total > -self._limit).all()):
            self._kept.clear()
            return None
        return log_total + self._log_factor[self._grid.local]

    def gradient(self, log_share: Tensor) -> PairGradient | None:
        log_factor = log_share + self._log_factor
        if not bool((log_factor.abs() < 1.1 * self._limit).all()):
            self._kept.clear()
            return None
        factor = log_factor.exp()  # (2, B)
        grad_similarity = factor / self._tau

        def weight(block: Block) -> Tensor:
            exponential = self._kept.popleft() if self._kept else self._exponential(block)[1]
            product = torch.add(*self._grid.anchors(grad_similarity, block)).mul_(exponential)
            return torch.threshold_(product, self._tiny, 0.0)

        local = self._grid.local
        grads = self._grid.gradient(weight)
        self._grid.add_positives(grads, -(grad_similarity[:, local] * self._total).sum(dim=0))
        # y = (s_ij/tau - c) + (c - s_ii/tau)
        mean_logit = factor[:, local] * (self._moment + self._log_factor[local] * self._total)
        return PairGradient(*grads, mean_logit)

    def _exponential(self, block: Block) -> tuple[Tensor, Tensor]:
        """s/tau - c of a block and its exponential, zero for positives."""
        exponent = self._grid.similarity(block).div_(self._tau).sub_(self._shift)
        # what would be subnormal becomes zero, which unlike `lowest_exponent` adds nothing to a sum that vanishes
        torch.threshold_(exponent, math.log(self._tiny), 2 * math.log(self._tiny))
        exponential = exponent.exp()
        self._grid.positives(exponential, block).fill_(0.0)
        return exponent, exponential
