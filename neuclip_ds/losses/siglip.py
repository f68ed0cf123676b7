"""SigLIP's loss: a sigmoid for every pair instead of a softmax (Zhai et al. 2023, eq. 1), with a learned bias.

    L = -1/B sum_{i, j} log sigmoid(z_ij (s_ij / tau + bias)),   z_ij = 1 where i = j, else -1

A pair's derivative needs only the pair's similarity, so each block is computed once. Pairs of local images with all
texts count toward the loss. Pairs of local texts with other ranks' images count only toward the gradient, because the
other ranks add the loss of these pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from neuclip_ds.errors import UserError
from neuclip_ds.losses.arithmetic import lowest_exponent
from neuclip_ds.losses.base import LossContext, LossFunction, LossOutput, Position, sum_over_ranks
from neuclip_ds.losses.distillation import combined, distill
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.pairs import IMAGE, Block, PairGrid
from neuclip_ds.losses.stored_features import TEACHER
from neuclip_ds.losses.temperature import LearnableTemperature


def siglip(config: ObjectiveConfig, context: LossContext) -> "SigmoidLoss":
    """Build SigLIP's loss.

    Raises `UserError` if the temperature or the bias at step 0 is unknown, or if the temperature is out of bounds.
    """
    bias = context.bias if config.siglip.bias is None else config.siglip.bias
    if bias is None:
        raise UserError(
            "The pretrained checkpoint has no logit_bias, from which SigLIP's loss starts; set objective.siglip.bias "
            "(SigLIP starts from -10)."
        )
    return SigmoidLoss(config, context, LearnableTemperature(config, context, bias=bias))


class SigmoidLoss(LossFunction):
    """SigLIP's loss, which computes each batch's feature gradient, and updates the temperature and the bias.

    Args:
        config: the options of the loss.
        context: sizes and settings of the run.
        logit: the learned temperature and bias of the logits.
    """

    def __init__(self, config: ObjectiveConfig, context: LossContext, logit: LearnableTemperature) -> None:
        super().__init__({"": logit})
        self.uses_stored = frozenset({TEACHER})
        self._config = config
        self._communicator = context.communicator
        self._logit = logit

    def __call__(self, batch: GatheredFeatures, position: Position, training: bool) -> LossOutput:
        tau = self._logit.of(batch)
        bias = self._logit.scalar("bias")
        grid = PairGrid(batch, self._config.chunk_size, budget=0)
        loss_sum = grid.positive.new_zeros(())
        derivative_sum = grid.positive.new_zeros(())  # of the loss with respect to the logits

        def grad_logit(block: Block) -> Tensor:
            negated_logit = torch.add(bias, grid.similarity(block).mul_(1 / tau))  # -z times the logit
            grid.positive_pairs(negated_logit, block).neg_()
            negated_logit.clamp_(min=lowest_exponent(negated_logit.dtype))
            derivative = negated_logit.sigmoid()
            grid.positive_pairs(derivative, block).neg_()
            if block.row_modality == IMAGE:
                loss_sum.add_(softplus(negated_logit).sum())
                derivative_sum.add_(derivative.sum())
            return derivative

        image, text = grid.gradient(grad_logit)
        divisor = batch.size * tau
        image.div_(divisor)
        text.div_(divisor)
        sums = {
            "loss": loss_sum / batch.size,
            "grad_bias": derivative_sum / batch.size,
            "grad_theta": grid.weighted_sum((image, text)),
        }
        if batch.teachers:
            distillation = distill(batch, tau, self._config.distill, self._config.chunk_size)
            image = combined(self._config.distill, image, distillation.image_gradient)
            text = combined(self._config.distill, text, distillation.text_gradient)
            sums["distill_loss"] = distillation.loss / batch.size
            sums["distill_grad_theta"] = distillation.grad_theta / batch.size
        sums["squared_norm"] = image.square().sum() + text.square().sum()
        totals = sum_over_ranks(self._communicator, sums)

        loss = totals["loss"]
        grad_bias = totals["grad_bias"]
        grad_theta = totals["grad_theta"]
        metrics = {"tau": tau, "bias": bias}
        if batch.teachers:
            loss = combined(self._config.distill, loss, totals["distill_loss"])
            grad_bias = self._config.distill.contrastive_weight * grad_bias
            grad_theta = combined(self._config.distill, grad_theta, totals["distill_grad_theta"])
            metrics["distill_loss"] = totals["distill_loss"]
        if training:
            self._logit.descend(position, theta=grad_theta, bias=grad_bias)
        gradient_norm = totals["squared_norm"].sqrt()
        metrics["feature_grad_norm"] = gradient_norm
        return LossOutput(
            loss=loss, image_gradient=image, text_gradient=text, gradient_norm=gradient_norm, metrics=metrics
        )
