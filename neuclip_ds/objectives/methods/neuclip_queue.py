"""NeuCLIP's loss with a normaliser from a queue, which needs no inner optimizer.

    L = 1/2n sum_i sum_{1, 2} [ exp(-alpha_i) (eps + g_i) + alpha_i - 1 ] + log(n-1),   eps = 1/(n-1)
    w_i = exp(-alpha_i)
    alpha_i = log(eps + (g_i + kappa ghat_i)/(1 + kappa)),   ghat1_i = 1/m sum_k c_k exp((e1_i . W_k - s_ii)/tau)

W holds the other side's last m features, and c_k weighs them so that ghat follows the batch's g.
normalizers/pooled_queue.py has the derivation and the gradient. tau is learned by this loss, as in OpenCLIP
(global_loss.py). With `temperature.rule=robust` the scale is tau, `objective.eps` holds, and 2 rho tau is added.
"""

from typing import Any

from pydantic import Field

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search
from neuclip_ds.objectives.prototypes_config import PrototypesConfig


class QueueConfig(PrototypesConfig):
    kappa: float = Field(1.0, gt=0, le=1e6)
    """Weight of the queue's estimate where it is pooled with the batch's, which weighs 1. Bounds (eps + g)/exp(alpha)
    by 1 + kappa."""
    kappa_steps: int = Field(0, ge=0)
    """Steps over which kappa rises linearly from 0. The queue's first features are those of encoders that still place
    all samples close together, and lag behind as they spread; 0 trusts them like later ones."""


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.composed import ContrastiveObjective
    from neuclip_ds.objectives.global_loss import global_loss
    from neuclip_ds.objectives.normalizers.pooled_queue import PooledQueueNormalizer
    from neuclip_ds.objectives.pair_loss import PairLoss

    loss = global_loss(config, context)
    normalizer = PooledQueueNormalizer(config.section(QueueConfig), loss.eps, context)
    return ContrastiveObjective(config, context, PairLoss(), normalizer, loss.temperature, loss.scale, loss.constant)


# fewer prototypes than a batch has rows, and more
_FEW: dict[str, Any] = {"prototypes": 7}
_MANY: dict[str, Any] = {"prototypes": 40, "kappa": 3.0, "kappa_steps": 4}
METHOD = Method(
    source="this project, from NeuCLIP eq. 10-12",
    normalizer="weighted queue of features, pooled with the batch: exp(-alpha_i)",
    scale="1/2; tau with rho",
    temperature="learned, without rho; or RGCL-g with it",
    compose=compose,
    sections={"queue": QueueConfig},
    defaults={"temperature": {"rule": "learned"}},
    has_temperature_rule=True,
    starts={"temperature": {"initial": 0.07}},
    test_options={
        "": {"queue": _FEW},
        "long": {"queue": _MANY},
        "rho": {"eps": 1e-6, "queue": _FEW, "temperature": {"rule": "robust"}},
        "fixed_temperature": {"queue": {**_FEW, "kappa": 0.3}, "temperature": {"lr": 0.0}},
    },
    search=Search(),
)
