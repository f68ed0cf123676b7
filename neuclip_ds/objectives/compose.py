"""Build the objective of a method from its row in the table.

`objective.temperature.rule` offers two ways to learn the one temperature of the global contrastive loss, each with the
loss's eps and scale.

`robust` is RGCL-g (FastCLIP eq. 10, NeuCLIP eq. 12): tau is learned from tau times the loss + 2 rho tau.

`learned` needs no rho. With eps = 1/(n-1) and the mean g_i over the n-1 negatives of the whole data set,

    (n-1) (eps + g_i) = 1 + sum_{j != i} exp((s_ij - s_ii)/tau),
    L = 1/2 1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + log(n-1)

is OpenCLIP's cross-entropy with the data set as the batch. The positive's own term keeps the loss from falling without
end as tau does, so that, as in OpenCLIP, log(1/tau) is learned by L's own gradient. With NeuCLIP's alpha_i,

    dL/dlog(1/tau) = 1/2 1/B sum_i [ mean logit_i - r_i tau dalpha_i/dtau ]         (both directions)

where the mean logit is exp(-alpha_i)/(B-1) sum_{j != i} exp(x_ij) x_ij, x_ij = (s_ij - s_ii)/tau.
"""

import math
from importlib import import_module
from typing import NamedTuple

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, Normalizer, Objective
from neuclip_ds.objectives.contrastive import ContrastiveObjective, Scale, scale_half, scale_one, scale_tau
from neuclip_ds.objectives.individual_temperature import IndividualTemperature
from neuclip_ds.objectives.methods import Method, find_method
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.objectives.pair_arithmetic import Hinge, OverBatch, PairLoss
from neuclip_ds.objectives.sigmoid import SigmoidObjective
from neuclip_ds.objectives.temperature import (
    ConstantTemperature,
    LogTemperature,
    RescaledTemperature,
    RobustTemperature,
    Temperature,
)

_SCALES: dict[str, Scale] = {"half": scale_half, "one": scale_one, "tau": scale_tau}


def compose_objective(config: ObjectiveConfig, context: Context) -> Objective:
    """Build the objective that `config.method` names; raise `UserError` where it needs n and n is unknown."""
    method = find_method(config.method)
    if method.normalizer is None:
        return SigmoidObjective(config, context)
    loss = _loss(method, config, context)
    module = import_module(f"neuclip_ds.objectives.normalizers.{method.normalizer}")
    normalizer: Normalizer = module.build(config, loss.eps, context)
    pair_loss = {
        "identity": PairLoss(),
        "over_batch": OverBatch(),
        "hinge": Hinge(config.hinge.margin, config.hinge.power),
    }[method.pair_loss]
    return ContrastiveObjective(config, context, pair_loss, normalizer, loss.temperature, loss.scale, loss.constant)


class _Loss(NamedTuple):
    """What the rule for the temperature decides."""

    temperature: Temperature
    scale: Scale
    eps: float  # added to every normalizer
    constant: float = 0.0  # of the loss


def _loss(method: Method, config: ObjectiveConfig, context: Context) -> _Loss:
    temperature, scale = config.temperature, _SCALES[method.scale]
    released = config.reference == "released_code"  # FastCLIP's
    match method.temperature:
        case "constant":
            return _Loss(ConstantTemperature(temperature, context), scale_one if released else scale, config.eps)
        case "individual":
            individual = IndividualTemperature(temperature, context, released)
            return _Loss(individual, scale_one if released else scale, config.eps)
        case "log":
            return _Loss(LogTemperature(temperature, context), scale, config.eps)
        case "rescaled":
            return _Loss(RescaledTemperature(temperature, context), scale, config.eps)
        case "rule" if temperature.rule == "learned":
            return _learned_loss(config, context)
    return _Loss(RobustTemperature(temperature, context, data_coefficient=2.0 if released else 1.0), scale, config.eps)


def _learned_loss(config: ObjectiveConfig, context: Context) -> _Loss:
    if not context.samples:
        raise UserError(
            "objective.temperature.rule=learned has eps = 1/(n-1), but n is unknown: pass ContrastiveLoss the number "
            "of training samples (samples=...), or use rule=robust."
        )
    others = max(1, context.samples - 1)
    return _Loss(LogTemperature(config.temperature, context), scale_half, 1 / others, math.log(others))
