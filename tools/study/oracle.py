"""A loss for the study alone: exact normalizers over all n pairs, which are too expensive for large data."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class OracleLoss(nn.Module):
    """Mean of exp(log g_i - sg(alpha_i)) over i and both directions; its gradient weights negatives by 1/exp(alpha_i).

    sg stops the gradient. g_i is the batch's mean over negatives of exp((s_ij - s_ii)/tau), and G_i is the mean over
    the negatives in all n pairs, with features that are at most `every` steps old. alpha_i is
    log(eps + (g_i + kappa G_i)/(1 + kappa)), or log(eps + G_i) if kappa is None; eps = 1/(n-1). `bound` limits the
    ratio exp(log g_i - alpha_i).
    """

    def __init__(
        self,
        pairs: Any,
        heads: Any,
        *,
        lr: float,
        kappa: float | None = 1.0,
        every: int = 100,
        tau: float = 0.07,
        learned: bool = True,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.pairs = pairs
        self.heads = (heads,)  # in a tuple, so that it is not a submodule
        self.lr = lr
        self.kappa = kappa
        self.every = every
        self.bound = bound
        self.calls = 0
        self.log_scale = nn.Parameter(torch.tensor(-math.log(tau)), requires_grad=learned)
        self._adam = torch.optim.Adam([self.log_scale], lr, betas=(0.9, 0.999), eps=1e-12) if learned else None
        self.metrics: dict[str, Tensor] = {}

    def forward(self, image: Tensor, text: Tensor, index: Tensor) -> Tensor:
        if self.calls % self.every == 0:
            images, self.texts = self.heads[0].encode(self.pairs)
            self.images = images[self.pairs.image_of]
        self.calls += 1
        tau = (-self.log_scale).exp()
        image_loss = self._direction(image, text, self.texts, index, tau)
        text_loss = self._direction(text, image, self.images, index, tau)
        loss = (image_loss + text_loss) / 2
        if self._adam is not None and self.training:
            (gradient,) = torch.autograd.grad(loss, [self.log_scale], retain_graph=True)
            self.log_scale.grad = gradient
            self._adam.step()
            with torch.no_grad():
                self.log_scale.clamp_(0.0, math.log(100))
        self.metrics = {"tau": (-self.log_scale.detach()).exp()}
        return loss

    def _direction(self, anchors: Tensor, partners: Tensor, everyone: Tensor, index: Tensor, tau: Tensor) -> Tensor:
        log_g = log_mean_exp(negative_logits(anchors, partners, partners, torch.arange(len(anchors)), tau))
        with torch.no_grad():
            exact = log_mean_exp(negative_logits(anchors, partners, everyone, index, tau))
            alpha = exact
            if self.kappa is not None:
                alpha = torch.logaddexp(log_g, exact + math.log(self.kappa)) - math.log1p(self.kappa)
            alpha = torch.logaddexp(alpha, torch.full_like(alpha, -math.log(len(everyone) - 1)))
            if self.bound is not None:
                alpha = alpha.clamp(min=log_g - math.log(self.bound))
        return (log_g - alpha).exp().mean()


def negative_logits(anchors: Tensor, partners: Tensor, candidates: Tensor, own: Tensor, tau: Tensor | float) -> Tensor:
    """Return (b, m) logits (s_ij - s_ii)/tau of anchors with candidates, -inf for the candidate `own` of each anchor.

    Args:
        anchors, partners: (b, d) features of the pairs.
        candidates: (m, d) features of the partners' modality.
        own: (b,) position of each anchor's partner among the candidates.
    """
    logits = (anchors @ candidates.T - (anchors * partners).sum(dim=1, keepdim=True)) / tau
    return logits.scatter(1, own[:, None], -math.inf)


def log_mean_exp(logits: Tensor) -> Tensor:
    """Return (b,) log g, the log of the mean over the m - 1 negatives."""
    return logits.logsumexp(dim=1) - math.log(logits.shape[1] - 1)
