"""OpenCLIP's loss: InfoNCE over the mini-batch (MBCL; Radford et al. 2021, Ilharco et al. 2021).

    1/2 1/B sum_i [ log(1 + sum_{j != i} exp((s_ij - s_ii)/tau)) + log(1 + sum_{j != i} exp((s_ji - s_ii)/tau)) ]

The softmax includes the positive, so an anchor's normalizer is 1/(B-1) + g_i, its weight is w_i = 1/(1/(B-1) + g_i),
and its loss is log(1 + sum_{j != i} exp((s_ij - s_ii)/tau)) = log(1/(B-1) + g_i) + log(B-1). By default, log(1/tau)
follows the gradient of this loss with the encoders' learning rate and schedule, as in FastCLIP Table 7.
"""

import math

import torch
from torch import Tensor

from neuclip_ds.losses.base import LossContext, Position
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.global_contrastive import (
    GlobalContrastiveLoss,
    NormalizerEstimator,
    NormalizerOutput,
    scale_half,
)
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.temperature import LogTemperature


def openclip(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build OpenCLIP's loss."""
    return GlobalContrastiveLoss(
        config,
        context,
        estimator=BatchEstimator(),
        temperature=LogTemperature(config, context),
        scale=scale_half,
    )


class BatchEstimator(NormalizerEstimator):
    """Estimator of the normalizers from the batch alone; it has no options and no state."""

    allows_reference = True

    def __call__(
        self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, position: Position, training: bool
    ) -> NormalizerOutput:
        log_negatives = math.log(batch.size - 1)
        log_normalizer = torch.logaddexp(log_g, log_g.new_full((), -log_negatives))
        log_weight = -batch.gather(log_normalizer, "normalizer")
        value = log_normalizer + log_negatives
        return NormalizerOutput(log_weight=log_weight, value=value)

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        return log_g
