"""Two ways to learn the one temperature of the global contrastive loss, with the loss's eps and scale.

`robust` is RGCL-g (FastCLIP eq. 10, NeuCLIP eq. 12): tau is learned from tau times the loss + 2 rho tau.

`learned` needs no rho. With eps = 1/(n-1) and the mean g_i over the n-1 negatives of the whole data set,

    (n-1) (eps + g_i) = 1 + sum_{j != i} exp((s_ij - s_ii)/tau),
    L = 1/2 1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + log(n-1)

is OpenCLIP's cross-entropy with the data set as the batch. The positive's own term keeps the loss from falling without
end as tau does, so that, as in OpenCLIP, log(1/tau) is learned by L's own gradient. With NeuCLIP's alpha_i,

    dL/dlog(1/tau) = 1/2 1/B sum_i [ mean logit_i - r_i tau dalpha_i/dtau ]         (both directions)

where the mean logit is exp(-alpha_i)/(B-1) sum_{j != i} exp(x_ij) x_ij, x_ij = (s_ij - s_ii)/tau.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context
from neuclip_ds.objectives.composed import Scale, scale_half, scale_tau
from neuclip_ds.objectives.temperature import LogTemperature, RobustTemperature, Temperature

if TYPE_CHECKING:
    from neuclip_ds.objectives.config import ObjectiveConfig


class GlobalLoss(NamedTuple):
    """What a rule for the temperature decides besides the rule itself."""

    temperature: Temperature
    scale: Scale
    eps: float  # added to every normaliser
    constant: float = 0.0  # of the loss


def global_loss(config: ObjectiveConfig, context: Context) -> GlobalLoss:
    """Build `objective.temperature.rule`; raise `UserError` where it needs n and n is unknown."""
    if config.temperature.rule != "learned":
        return GlobalLoss(RobustTemperature(config.temperature, context), scale_tau, config.eps)
    if not context.samples:
        raise UserError(
            "objective.temperature.rule=learned has eps = 1/(n-1), but n is unknown: pass ContrastiveLoss the number "
            "of training samples (samples=...), or use rule=robust."
        )
    others = max(1, context.samples - 1)
    return GlobalLoss(LogTemperature(config.temperature, context), scale_half, 1 / others, math.log(others))
