"""The weighted-pair gradient in closed form: this rank's rows against gathered columns, chunk by chunk.

Every contrastive method has the feature gradient of

    L = 1/B sum_i [ W1_i g1_i + W2_i g2_i ],   g1_i = 1/(B-1) sum_{j != i} exp(l(s_ij - s_ii) / tau),
                                               g2_i = 1/(B-1) sum_{j != i} exp(l(s_ji - s_ii) / tau)

with the weights W held constant (METHODS.md, "One gradient, many normalisers"). A rank needs its own rows of
S = E1 E2^T and of its transpose T = E2 E1^T only. Where both anchor and partner are its own, T is S read the
other way, so that block is multiplied, exponentiated and applied once. No gradient travels between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.pair_loss import PairLoss

IMAGE, TEXT = 0, 1


class _Block(NamedTuple):
    """Similarities of this rank's rows on one side with some columns of the other side."""

    side: int  # IMAGE: rows are images and columns texts; TEXT: the other way round
    start: int  # columns [start, stop) of the B rows of the batch
    stop: int
    own: bool  # the columns are this rank's, so the block holds their anchors' similarities as well

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


class PairGradient(NamedTuple):
    """Gradient of L and what the temperature needs."""

    image: Tensor  # (own, d)
    text: Tensor  # (own, d)
    mean_logit: Tensor  # (2, own): W_i/(B-1) sum_j exp(y_ij) y_ij with y_ij = l(x_ij)/tau; -tau dL/dtau is its mean


class PairSimilarities:
    """The similarities of one batch, visited twice: for the log-mean-exps, then for the gradient.

    Between the visits they are kept if they fit into `budget` bytes, and computed again if not, so that memory is
    O(own x chunk) + budget.
    """

    def __init__(self, batch: GatheredFeatures, pair_loss: PairLoss, tau: Tensor, chunk: int, budget: float) -> None:
        """
        Args:
            batch: gathered features with B >= 2 valid rows.
            pair_loss: l.
            tau: (2, B) temperature of every anchor.
            chunk: columns worked on at once.
            budget: bytes of similarities that may be kept.
        """
        self._features = (batch.image, batch.text)
        self._own = batch.own
        self._size = batch.size
        self._pair_loss = pair_loss
        self._tau = tau
        self._chunk = chunk
        self._positive = torch.linalg.vecdot(batch.image, batch.text)  # (B,) s_ii
        own = self._own.stop - self._own.start
        kept = own * (2 * self._size - own) * batch.image.element_size()
        self._keep = kept <= budget
        self._kept: dict[_Block, Tensor] = {}

    def log_mean_exp(self) -> Tensor:
        """(2, own): log g of this rank's anchors."""
        own = self._own.stop - self._own.start
        result = self._positive.new_full((2, own), -math.inf)
        for block in self._blocks():
            similarity = self._similarity(block)
            if self._keep:
                self._kept[block] = similarity
            exponent = self._exponent(similarity, block, anchors="rows")
            result[block.side] = torch.logaddexp(result[block.side], exponent.logsumexp(dim=1))
            if block.own:
                exponent = self._exponent(similarity, block, anchors="columns")
                result[1 - block.side, self._within_own(block)] = exponent.logsumexp(dim=0)
        return result - math.log(self._size - 1)

    def gradient(self, log_weight: Tensor) -> PairGradient:
        """Gradient of L for weights W = exp(log_weight), (2, B); ends the life of the kept similarities."""
        own = self._own.stop - self._own.start
        log_share = log_weight - math.log(self._size - 1)
        grads = tuple(features.new_zeros((own, features.shape[1])) for features in self._features)
        pull = self._positive.new_zeros((2, own))
        mean_logit = self._positive.new_zeros((2, own))
        for block in self._blocks():
            similarity = self._kept.pop(block) if self._keep else self._similarity(block)
            weight, logit = self._pair_weight(similarity, log_share, block, anchors="rows")
            pull[block.side] += weight.sum(dim=1)
            mean_logit[block.side] += logit
            other, other_logit = self._pair_weight(similarity, log_share, block, anchors="columns")
            columns = self._features[1 - block.side][block.columns]
            if block.own:
                within = self._within_own(block)
                pull[1 - block.side, within] = other.sum(dim=0)
                mean_logit[1 - block.side, within] = other_logit
            weight += other
            grads[block.side].addmm_(weight, columns)
            if block.own:
                grads[1 - block.side][within].addmm_(weight.T, self._features[block.side][self._own])
        total = pull.sum(dim=0).unsqueeze(1)
        for side, grad in enumerate(grads):
            grad.addcmul_(total, self._features[1 - side][self._own], value=-1).div_(self._size)
        return PairGradient(grads[IMAGE], grads[TEXT], mean_logit)

    def _blocks(self) -> Iterator[_Block]:
        """Own columns once, as image rows x text columns; columns of other ranks once for each side."""
        start, stop = self._own.start, self._own.stop
        for low in range(start, stop, self._chunk):
            yield _Block(IMAGE, low, min(low + self._chunk, stop), own=True)
        for first, last in ((0, start), (stop, self._size)):
            for low in range(first, last, self._chunk):
                for side in (IMAGE, TEXT):
                    yield _Block(side, low, min(low + self._chunk, last), own=False)

    def _similarity(self, block: _Block) -> Tensor:
        rows = self._features[block.side][self._own]
        return rows @ self._features[1 - block.side][block.columns].T

    def _within_own(self, block: _Block) -> slice:
        return slice(block.start - self._own.start, block.stop - self._own.start)

    def _anchors(self, values: Tensor, block: _Block, anchors: str) -> Tensor:
        """Values of a block's row or column anchors out of (2, B), shaped to broadcast over the block."""
        if anchors == "rows":
            return values[block.side, self._own].unsqueeze(1)
        return values[1 - block.side, block.columns].unsqueeze(0)

    def _difference(self, similarity: Tensor, block: _Block, anchors: str) -> Tensor:
        positive = self._positive.expand(2, -1)
        return similarity - self._anchors(positive, block, anchors)

    def _exponent(self, similarity: Tensor, block: _Block, anchors: str) -> Tensor:
        """l(x)/tau with the positives masked out by -inf."""
        x = self._pair_loss.value_(self._difference(similarity, block, anchors))
        x.mul_(self._anchors(self._tau, block, anchors).reciprocal())
        self._mask_positive_(x, block, -math.inf)
        return x

    def _pair_weight(
        self, similarity: Tensor, log_share: Tensor, block: _Block, anchors: str
    ) -> tuple[Tensor, Tensor | None]:
        """Derivative of B L by each similarity, and the anchors' sum of weight times logit (own anchors only)."""
        difference = self._difference(similarity, block, anchors)
        slope = self._pair_loss.slope(difference)
        inverse_tau = self._anchors(self._tau, block, anchors).reciprocal()
        logit = self._pair_loss.value_(difference).mul_(inverse_tau)
        weight = (logit + self._anchors(log_share, block, anchors)).exp_()
        self._mask_positive_(weight, block, 0.0)
        mean_logit = None
        if anchors == "rows":
            mean_logit = logit.mul_(weight).sum(dim=1)
        elif block.own:
            mean_logit = logit.mul_(weight).sum(dim=0)
        if slope is not None:
            weight.mul_(slope)
        return weight.mul_(inverse_tau), mean_logit

    def _mask_positive_(self, x: Tensor, block: _Block, value: float) -> None:
        if block.own:
            x.diagonal(offset=self._own.start - block.start).fill_(value)
