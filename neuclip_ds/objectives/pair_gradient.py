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

from neuclip_ds.objectives.pair_arithmetic import PairLoss, exp_, log_sum_exp
from neuclip_ds.objectives.pair_grid import Block, PairGrid


class PairGradient(NamedTuple):
    """Gradient of L and what the temperature needs.

    `mean_logit` is W_i/(B-1) sum_j exp(y_ij) y_ij with y_ij = l(x_ij)/tau, (2, local); where all anchors share one tau,
    this rank's 0-dim share of its sum over all anchors. -tau dL/dtau is its mean over anchors.
    """

    image: Tensor  # (local, d)
    text: Tensor  # (local, d)
    mean_logit: Tensor


class BlockWeights(NamedTuple):
    """What the gradient takes from a block of similarities; sums are over the negatives of each local anchor."""

    total: Tensor  # (rows, columns), derivative by each similarity
    pulls: list[Tensor]  # of the block's rows, then of its columns where they are local: sums of weights
    products: list[Tensor]  # likewise of weights x similarities; empty where all anchors share one tau


class PairSimilarities:
    """The similarities of one batch, visited twice: for the log-mean-exps, then for the gradient.

    Between the visits they are kept if they fit into the grid's budget, and computed again if not, so that memory is
    O(block) + budget. On a GPU the host reads no number of the device.
    """

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        """`tau` is 0-dim if all anchors share it, else (2, B)."""
        self.divisor = pair_loss.divisor(grid.size)
        self._grid, self._pair_loss, self._tau = grid, pair_loss, tau
        # whether its exponentials have sufficed is read from the device, which on a GPU would stop the host
        factors = tau.ndim == 0 and pair_loss.is_identity and tau.device.type == "cpu"
        self._pairs: FactoredPairs | GeneralPairs = FactoredPairs(grid, tau) if factors else self._general()

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

    def _general(self) -> GeneralPairs:
        return GeneralPairs(self._grid, self._pair_loss, self._tau)


class GeneralPairs:
    """Any pair loss and temperatures: each pair has an exponential for either of its anchors.

    Each anchor's sum is taken relative to its largest term, and a pair's weight is one exponential of a sum of
    logarithms, so that nothing that counts vanishes or overflows.
    """

    def __init__(self, grid: PairGrid, pair_loss: PairLoss, tau: Tensor) -> None:
        self._grid, self._pair_loss = grid, pair_loss
        self._shared = tau.ndim == 0
        self._scale = tau.pow(1 / pair_loss.power).expand(2, grid.size)  # that similarities are divided by
        self._origin = (grid.positive - pair_loss.margin) / self._scale
        self._kept: deque[Tensor] = deque()
        self._buffers: list[Tensor] = []

    def log_sum_exp(self) -> Tensor:
        grid = self._grid
        result = grid.per_anchor(-math.inf)
        for block in grid.blocks():
            similarity = self._similarity(block)
            if grid.keeps:
                self._kept.append(similarity)
            for anchors, log_sum in zip(block.local_anchors, self._log_sums(similarity, block), strict=True):
                sums = result[anchors.side, anchors.local]
                torch.logaddexp(sums, log_sum, out=sums)
        self._buffers.clear()
        return result + self._pair_loss.offset(self._origin[:, grid.local])

    def gradient(self, log_share: Tensor) -> PairGradient:
        grid, pair_loss = self._grid, self._pair_loss
        # of exp(l/tau) times the derivative of l/tau by the similarity
        log_factor = log_share + (pair_loss.power / self._scale).log()
        pull, products = grid.per_anchor(0.0), grid.per_anchor(0.0)  # sums of weights, of weights x similarities

        def weight(block: Block) -> Tensor:
            similarity = self._kept.popleft() if self._kept else self._similarity(block)
            found = self._weights(similarity, block, log_factor)
            for anchors, by_anchor in zip(block.local_anchors, found.pulls, strict=True):
                pull[anchors.side, anchors.local] += by_anchor
            for anchors, by_anchor in zip(block.anchors, found.products, strict=False):
                products[anchors.side, anchors.local] += by_anchor
            return found.total

        grads = grid.gradient(weight)
        # (x + margin) l'(x) = power l(x)
        about_origin = (pair_loss.margin - grid.positive[grid.local]) * pull
        mean_logit = grid.weighted_sum(grads) + about_origin.sum() if self._shared else products + about_origin
        grid.add_positives(grads, -pull.sum(dim=0))
        return PairGradient(*grads, mean_logit / pair_loss.power)

    def _log_sums(self, similarity: Tensor, block: Block) -> list[Tensor]:
        """Return logsumexp of the exponents over the negatives of the block's local anchors: its rows, its columns."""
        grid = self._grid
        (out,) = self._views(block, 1)
        origins, scales = grid.of_anchors(self._origin, block), grid.of_anchors(self._scale, block)
        found = []
        for anchors, origin, scale in zip(block.local_anchors, origins, scales, strict=False):
            exponent = self._pair_loss.exponent(self._scaled(similarity, scale, out), origin, out)
            grid.positives(exponent, block).fill_(-math.inf)
            found.append(log_sum_exp(exponent, anchors.partners, out))
        return found

    def _weights(self, similarity: Tensor, block: Block, log_factor: Tensor) -> BlockWeights:
        """Return the derivative by the similarities of a block, both anchors of each pair taken together."""
        grid = self._grid
        *parts, other = self._views(block, 3)
        by_block = [grid.of_anchors(values, block) for values in (self._origin, self._scale, log_factor)]
        pulls, products = [], []
        for anchors, part, origin, scale, factor in zip(block.anchors, parts, *by_block, strict=True):
            self._pair_loss.weight(self._scaled(similarity, scale, part), origin, factor, part, other)
            grid.positives(part, block).fill_(0.0)
            if anchors in block.local_anchors:
                pulls.append(part.sum(anchors.partners))
                if not self._shared:
                    products.append(torch.mul(part, similarity, out=other).sum(anchors.partners))
        return BlockWeights(parts[0].add_(parts[1]), pulls, products)

    def _views(self, block: Block, count: int) -> list[Tensor]:
        """Return tensors in the shape of a block, the same memory for every block of a visit."""
        if not self._buffers:
            self._buffers.extend(self._grid.buffers(count))
        return [block.view(buffer) for buffer in self._buffers]

    def _similarity(self, block: Block) -> Tensor:
        """Return the similarities of a block, scaled if all anchors share the scale."""
        similarity = self._grid.similarity(block)
        return similarity.div_(self._scale[0, 0]) if self._shared else similarity

    def _scaled(self, similarity: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Return what `_similarity` has returned, scaled for the anchors, as it is or in `out`."""
        return similarity if self._shared else torch.div(similarity, scale, out=out)


class FactoredPairs:
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
        self._shift = max(1 / float(tau) - self._limit, 0.0)
        self._log_factor = self._shift - grid.positive / tau  # (B,)
        self._total = grid.per_anchor(0.0)
        self._kept: deque[Tensor] = deque()

    def log_sum_exp(self) -> Tensor | None:
        for block in self._grid.blocks():
            exponential = self._exponential(block)
            if self._grid.keeps:
                self._kept.append(exponential)
            for anchors in block.anchors:
                if anchors.local is not None:
                    self._total[anchors.side, anchors.local] += exponential.sum(anchors.partners)
        log_total = self._total.log()
        if not bool((log_total > -self._limit).all()):
            self._kept.clear()
            return None
        return log_total + self._log_factor[self._grid.local]

    def gradient(self, log_share: Tensor) -> PairGradient | None:
        grid = self._grid
        log_factor = log_share + self._log_factor
        if not bool((log_factor.abs() < 1.1 * self._limit).all()):
            self._kept.clear()
            return None
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
        return PairGradient(*grads, mean_logit)

    def _exponential(self, block: Block) -> Tensor:
        """exp(s/tau - c) of a block, zero for positives."""
        exponent = self._grid.similarity(block).div_(self._tau)
        if self._shift:
            exponent.sub_(self._shift)
            # what would be subnormal becomes zero, which unlike `lowest_exponent` adds nothing to a sum that vanishes
            torch.threshold_(exponent, math.log(self._tiny), 2 * math.log(self._tiny))
        exponential = exp_(exponent)
        self._grid.positives(exponential, block).fill_(0.0)
        return exponential
