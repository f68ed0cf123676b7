"""SigLIP's pairwise sigmoid loss (Zhai et al. 2023, eq. 1), with a closed-form gradient.

    L = -1/B sum_{i, j} log sigmoid(z_ij (s_ij / tau + bias)),   z_ij = 1 where i = j, else -1

A pair's derivative needs only the pair's similarity, so each block is computed once. Pairs of local images with all
texts count toward the loss. Pairs of local texts with other ranks' images count only toward the gradient, because the
other ranks add the loss of these pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, FeatureGradients, Objective, Step
from neuclip_ds.objectives.gather import Features, GatheredFeatures
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.objectives.pair_arithmetic import lowest_exponent, products_exact_for
from neuclip_ds.objectives.pair_grid import IMAGE, Block, PairGrid
from neuclip_ds.objectives.temperature import LearnableTemperature


class SigmoidObjective(Objective):
    """SigLIP's objective: the feature gradient of each batch, and an optimizer step on the temperature and the bias."""

    def __init__(self, config: ObjectiveConfig, context: Context) -> None:
        bias = context.bias if config.siglip.bias is None else config.siglip.bias
        if bias is None:
            raise UserError(
                "The pretrained checkpoint has no logit_bias, which SigLIP's loss starts from; pass "
                "--objective.siglip.bias (SigLIP starts from -10)."
            )
        self._config, self._logit = config, LearnableTemperature(config, context, bias=bias)
        super().__init__(context, {"": self._logit})

    @torch.no_grad()
    @products_exact_for(torch.float32)
    def __call__(self, features: Features, step: Step) -> FeatureGradients:
        batch = GatheredFeatures(features, self._communicator, self.comm_dtype)
        batch.require_pairs(step.number)
        tau, bias = self._logit.of(batch), self._logit.scalar("bias")
        grid = PairGrid(batch, self._config.chunk_size, budget=0)
        sums = grid.positive.new_zeros(2)  # sums of the loss and of its derivatives with respect to the logits

        def grad_logit(block: Block) -> Tensor:
            against = torch.add(bias, grid.similarity(block).mul_(1 / tau))  # -z times the logit
            grid.positives(against, block).neg_()
            against.clamp_(min=lowest_exponent(against.dtype))
            derivative = against.sigmoid()
            grid.positives(derivative, block).neg_()
            if block.side == IMAGE:
                sums.add_(torch.stack([softplus(against).sum(), derivative.sum()]))
            return derivative

        image, text = grads = grid.gradient(grad_logit)
        for grad in grads:
            grad.div_(batch.size * tau)
        sums = torch.cat([sums / batch.size, grid.weighted_sum(grads)[None]])
        square = image.square().sum() + text.square().sum()
        loss, grad_bias, grad_theta, square = self._communicator.all_reduce(torch.cat([sums, square[None]]), "scalars")
        if step.learn:
            self._logit.descend(step, theta=grad_theta, bias=grad_bias)
        metrics = {"tau": tau, "bias": bias, "feature_grad_norm": square.sqrt()}
        return FeatureGradients(batch.expand(image), batch.expand(text), loss, metrics)
