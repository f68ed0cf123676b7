"""TuneCLIP's losses for fine-tuning a checkpoint (arXiv 2601.09859), with or without a hinge.

If `recovery.epochs` is above 0, `training/recovery.py` recovers the optimizer's moments and u (OSR, TuneCLIP's first
stage) before training. u is the moving average of fastclip.py. The temperature is constant; by default, it is the
checkpoint's. A sum over negatives is divided by B instead of B - 1.
"""

from neuclip_ds.losses.base import LossContext
from neuclip_ds.losses.fastclip import constant_temperature_loss
from neuclip_ds.losses.global_contrastive import GlobalContrastiveLoss
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.pairs import Hinge, PairLoss


def gcl(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build the loss without the hinge, for captions written by people (Flickr30k in the paper).

    The hinge's margin is for false negatives, which are rare among such captions.

    tau/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ],   g1_i = 1/B sum_{j != i} exp((s_ij - s_ii)/tau)
    """
    return constant_temperature_loss(config, context, PairLoss(divisor_offset=0))


def tuneclip(config: ObjectiveConfig, context: LossContext) -> GlobalContrastiveLoss:
    """Build the loss with the hinge (HGCL, eq. 8).

    It is the loss of `gcl` with g1_i = 1/B sum_{j != i} exp(l(s_ij - s_ii)/tau),   l(x) = max(x + margin, 0)^2
    """
    return constant_temperature_loss(config, context, Hinge(config.hinge.margin))
