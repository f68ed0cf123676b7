"""Contrastive distillation: train the student's softmax over a batch to match that of one or more teachers.

This is open_clip's `DistillClipLoss`. The softmaxes of T teachers are averaged, as in MobileCLIP (Vasu et al. 2024):

    q1_ij = 1/T sum_t softmax_j(z^t_ij/tau_t),   p1_ij = softmax_j(s_ij/tau)                 (image anchors i, texts j)
    D     = -1/2 1/B sum_i [ sum_j q1_ij log p1_ij + sum_j q2_ij log p2_ij ]                 (q2, p2: text anchors)

where z^t_ij are the similarities of teacher t, and j = i is included. With L as the method's loss, the total loss is

    contrastive_weight L + weight D

D is InfoNCE plus a function that is linear in the student's similarities:

    D = InfoNCE + 1/2 1/B sum_i sum_{1, 2} [ s_ii - sum_j q_ij s_ij ]/tau

so pairs.py computes the gradient of the first part, with OpenCLIP's weights, and the derivative of the second part with
respect to s_ij is a constant. With theta = log(1/tau), dD/dtheta is the derivative of InfoNCE plus the second part
itself.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip_ds.losses.arithmetic import bounded_exp_
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.options import DistillConfig
from neuclip_ds.losses.pairs import Block, FactoredSimilarities, PairGrid, PairLoss, PairSimilarities, pair_similarities


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The distillation D of a batch, without its weight, and its derivatives."""

    loss: Tensor
    """0-dim: this rank's contribution to B D."""
    image_gradient: Tensor
    """(local, d): gradient with respect to the image features"""
    text_gradient: Tensor
    """(local, d): gradient with respect to the text features"""
    grad_theta: Tensor
    """0-dim: this rank's contribution to B dD/dtheta, with theta = log(1/tau)."""
    local_grad_tau: Tensor | None
    """(2, local): derivatives of the anchors' terms of B D with respect to their taus; None if they share tau."""


@dataclass(frozen=True, kw_only=True)
class _Logits:
    """The pairs of the student or a teacher, with the temperature and the normalizers of their softmaxes."""

    grid: PairGrid
    similarities: PairSimilarities | FactoredSimilarities
    tau: Tensor
    """Temperature, 0-dim if shared by all anchors, else (2, B)"""
    log_excess: Tensor
    """(2, local): log(1 + sum_{j != i} exp((s_ij - s_ii)/tau)), which is minus the log of the softmax at j = i"""

    @classmethod
    def of(cls, batch: GatheredFeatures, tau: Tensor, columns: int | None) -> "_Logits":
        grid = PairGrid(batch, columns, budget=0)
        similarities = pair_similarities(grid, PairLoss(), tau)
        log_sum = similarities.log_mean_exp() + math.log(batch.size - 1)
        log_excess = torch.logaddexp(log_sum, torch.zeros_like(log_sum))
        return cls(grid=grid, similarities=similarities, tau=tau, log_excess=log_excess)


def distill(batch: GatheredFeatures, tau: Tensor, config: DistillConfig, columns: int | None) -> Distillation:
    """Return the distillation D of a batch and its derivatives, for the teachers whose features the batch contains.

    Raises `UserError` if the number of teachers does not match the temperatures in `config`.

    Args:
        batch: the gathered features.
        tau: the student's temperature, 0-dim if shared by all anchors, else (2, B).
        config: the options of the distillation.
        columns: maximum number of columns of a block; if None, `PairGrid` chooses it.
    """
    student = _Logits.of(batch, tau, columns)
    teachers: list[_Logits] = []
    for features, temperature in zip(batch.teachers, config.temperatures(len(batch.teachers)), strict=True):
        teacher_tau = tau.new_full((), temperature)
        teachers.append(_Logits.of(batch.with_features(features), teacher_tau, columns))
    log_excess = batch.gather(torch.cat([logits.log_excess for logits in (student, *teachers)]), "distillation")
    log_excess = log_excess.view(1 + len(teachers), 2, batch.size)

    # InfoNCE of the student, with OpenCLIP's weights 1/2 (B-1)/exp(log_excess)
    infonce = student.similarities.gradient(math.log((batch.size - 1) / 2) - log_excess[0])

    # the linear part: 1/(2B) (s_ii - sum_j q_ij s_ij)/tau for both anchors of each pair
    grid = student.grid
    factor = (1 / (2 * batch.size * tau)).expand(2, batch.size)
    target_sum = grid.per_local_anchor(0.0)  # sum_j q_ij s_ij, only with individual temperatures

    def derivative(block: Block) -> Tensor:
        row_target, column_target = _targets(block, teachers, log_excess[1:])
        if tau.ndim:
            similarity = grid.similarity(block)
            for (index, partner_dim), target in zip(block.local_anchors, (row_target, column_target), strict=False):
                target_sum[index].add_((target * similarity).sum(partner_dim))
        row_factor, column_factor = grid.select_anchors(factor, block)
        return row_target.mul_(-row_factor).sub_(column_target.mul_(column_factor))

    grads = grid.gradient(derivative)
    linear = grid.weighted_sum(grads)
    grad_positive = factor[:, batch.local].sum(dim=0)
    grid.add_positives(grads, grad_positive)
    local_positive = batch.positive[batch.local]
    linear = batch.size * (linear + (grad_positive * local_positive).sum())

    local_grad_tau = None
    if tau.ndim:
        local_tau = tau[:, batch.local]
        local_grad_tau = -(infonce.weighted_logits + (local_positive - target_sum) / (2 * local_tau)) / local_tau
    return Distillation(
        loss=student.log_excess.sum() / 2 + linear,
        image_gradient=infonce.image + grads[0],
        text_gradient=infonce.text + grads[1],
        grad_theta=infonce.weighted_logits.sum() + linear,
        local_grad_tau=local_grad_tau,
    )


def combined(config: DistillConfig, contrastive: Tensor, distillation: Tensor) -> Tensor:
    """Return the weighted sum of the method's loss and the distillation, or of their derivatives."""
    return config.contrastive_weight * contrastive + config.weight * distillation


def _targets(block: Block, teachers: list[_Logits], log_excess: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block's targets q_ij of the row anchors and of the column anchors; `log_excess` is (T, 2, B)."""
    row_targets: list[Tensor] = []
    column_targets: list[Tensor] = []
    for teacher, teacher_excess in zip(teachers, log_excess, strict=True):
        log_divisor = teacher_excess + teacher.grid.positive / teacher.tau
        row_divisor, column_divisor = teacher.grid.select_anchors(log_divisor, block)
        logit = teacher.grid.similarity(block).div_(teacher.tau)
        row_targets.append(bounded_exp_(logit - row_divisor))
        column_targets.append(bounded_exp_(logit.sub_(column_divisor)))
    return _mean(row_targets), _mean(column_targets)


def _mean(terms: list[Tensor]) -> Tensor:
    """Return the mean of tensors, the first of which is overwritten."""
    total = terms[0]
    for term in terms[1:]:
        total.add_(term)
    return total.div_(len(terms)) if len(terms) > 1 else total
