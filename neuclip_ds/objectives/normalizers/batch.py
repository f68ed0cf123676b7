"""Normalizer computed from the batch alone, as in OpenCLIP's mini-batch contrastive loss (MBCL, or InfoNCE).

The softmax includes the positive, so an anchor's normalizer is 1/(B-1) + g_i, and the anchor's loss is
log(1 + sum_{j != i} exp((s_ij - s_ii)/tau)) = log(1/(B-1) + g_i) + log(B-1).
"""

import math

import torch
from torch import Tensor

from neuclip_ds.objectives.base import Context, Normalizer, NormalizerOutput, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.options import ObjectiveConfig


class BatchNormalizer(Normalizer):
    """Normalizer computed from the batch alone, w_i = 1/(1/(B-1) + g_i); it has no options and no state."""

    def __init__(self, config: ObjectiveConfig, eps: float, context: Context) -> None:
        pass

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        log_negatives = math.log(batch.size - 1)
        log_normalizer = torch.logaddexp(log_g, log_g.new_full((), -log_negatives))
        log_weight = -batch.gather(log_normalizer, "normalizer")
        value = log_normalizer + log_negatives
        return NormalizerOutput(log_weight, value, value, {})

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        return log_g


build = BatchNormalizer
