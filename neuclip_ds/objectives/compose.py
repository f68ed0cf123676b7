"""Build the objective of a method from the method's row in the table.

`objective.temperature.rule` selects one of two ways to learn the single temperature of the global contrastive loss.
They differ in eps and in the scale of the loss.

`robust` is RGCL-g (FastCLIP eq. 10, NeuCLIP eq. 12): tau is learned by minimizing (tau times the loss) + 2 rho tau.

`learned` does not use rho. With eps = 1/(n-1), and with g_i as the mean over the n-1 negatives in the dataset,

    (n-1) (eps + g_i) = 1 + sum_{j != i} exp((s_ij - s_ii)/tau),
    L = 1/2 1/n sum_i [ log(eps + g1_i) + log(eps + g2_i) ] + log(n-1)

so L is OpenCLIP's cross-entropy with the dataset as the batch. The positive's term keeps L bounded below as tau
decreases, so log(1/tau) can follow the gradient of L, as in OpenCLIP. With NeuCLIP's alpha_i,

    dL/dlog(1/tau) = 1/2 1/B sum_i [ mean logit_i - r_i tau dalpha_i/dtau ]         (both directions)

where mean logit_i is exp(-alpha_i)/(B-1) sum_{j != i} exp(x_ij) x_ij, with x_ij = (s_ij - s_ii)/tau.
"""

import math
from importlib import import_module

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, Normalizer, Objective
from neuclip_ds.objectives.contrastive import SCALES, ContrastiveObjective
from neuclip_ds.objectives.individual_temperature import IndividualTemperature
from neuclip_ds.objectives.methods import find_method
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.objectives.pair_loss import Hinge, PairLoss
from neuclip_ds.objectives.sigmoid import SigmoidObjective
from neuclip_ds.objectives.temperature import (
    ConstantTemperature,
    LogTemperature,
    RescaledTemperature,
    RobustTemperature,
    Temperature,
)

_TEMPERATURES: dict[str, type[Temperature]] = {
    "constant": ConstantTemperature,
    "individual": IndividualTemperature,
    "log": LogTemperature,
    "rescaled": RescaledTemperature,
    "robust": RobustTemperature,
}


def compose_objective(config: ObjectiveConfig, context: Context) -> Objective:
    """Build the objective of `config.method`; raise `UserError` if the dataset size is needed but unknown."""
    method = find_method(config.method)
    if method.normalizer is None:
        return SigmoidObjective(config, context)
    rule, scale, eps, constant = method.temperature, method.scale, config.eps, 0.0
    if rule == "rule":
        rule = "robust"
        if config.temperature.rule == "learned":
            others = _other_samples(context)
            rule, scale, eps, constant = "log", "half", 1 / others, math.log(others)
    elif rule in ("constant", "individual") and config.reference == "released_code":
        scale = "one"
    pair_loss = {
        "identity": PairLoss(),
        "over_batch": PairLoss(excluded=0),
        "hinge": Hinge(config.hinge.margin),
    }[method.pair_loss]
    module = import_module(f"neuclip_ds.objectives.normalizers.{method.normalizer}")
    normalizer: Normalizer = module.build(config, eps, context)
    temperature = _TEMPERATURES[rule](config, context)
    return ContrastiveObjective(config, context, pair_loss, normalizer, temperature, SCALES[scale], constant)


def _other_samples(context: Context) -> int:
    """Return n - 1, the number of negatives of an anchor in the dataset."""
    if not context.samples:
        raise UserError(
            "objective.temperature.rule=learned has eps = 1/(n-1), but n is unknown: pass ContrastiveLoss the number "
            "of training samples (samples=...), or use rule=robust."
        )
    return max(1, context.samples - 1)
