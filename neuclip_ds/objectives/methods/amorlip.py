"""AmorLIP: a small network amortises the partition functions (arXiv 2505.18983, eq. 6, rescaled by tau).

    L = tau (-2 mean s_ii/tau + mean C1_i/lambda1_i + mean C2_i/lambda2_i) + rho tau
    C1_i = 1/(B-1) [ sum_{j != i} exp(s_ij/tau) + c exp(s_ii/tau) ],   lambda1_i = exp(MLP(e1_i)), held constant

In the common gradient w_i = exp(s_ii/tau)/lambda_i. normalizers/amortized.py has the network's own loss and targets.
"""

from typing import Literal

from pydantic import Field

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search
from neuclip_ds.section import Section


class AmortizedConfig(Section):
    follows_epochs = True
    width: float = Field(1.0, gt=0)
    """Hidden units of the amortisation MLP as a multiple f_d of the feature width."""
    loss: Literal["l2_log", "kl", "js"] = "l2_log"
    """Loss that lambda is fitted by: squared error of logarithms, or KL or Jensen-Shannon divergence."""
    divergence_l2: float = Field(0.1, ge=0)
    """Weight of l2_log in addition to kl and js."""
    lr: float = Field(1e-3, gt=0)
    """Adam's learning rate (the released code multiplies it by the number of ranks)."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest gradient norm of the MLPs; 0 does not clip."""
    updates: int = Field(3, ge=0)
    """Adam steps T_lambda on a batch."""
    online_every: int = Field(1, ge=1)
    """Steps T_online between fits of the online nets."""
    target_every: int = Field(2, ge=1)
    """Steps T_target between updates of the EMA target nets."""
    ema: float = Field(0.999, ge=0, le=1)
    """Decay alpha of the EMA."""
    previous_weight: float = Field(0.8, ge=0, lt=1)
    """Largest weight beta_T of the previous epoch's net in the target."""
    previous_epochs: float = Field(16, ge=0)
    """Epochs over which that weight rises from 0 on a cosine: all of the run in the paper, 16 of 33 in the README."""
    positive_weight: float = Field(1.0, ge=0)
    """Weight c of an anchor's own pair in the partition: 1 in the paper, 1e-3 in the released scripts."""
    stage2: Literal["ema", "combined"] = "ema"
    """Normaliser of the encoders' loss: the EMA target net (paper), or the combined batch target (released code)."""
    start: Literal["batch_mean", "released_code"] = "batch_mean"
    """Level of an epoch's new nets: the mean log Z of its first batch, or near 0; the paper leaves it open."""
    max_ratio: float | None = Field(None, gt=0)
    """Bound on C/lambda, with which an anchor's negatives weigh. By default none (AmorLIP)."""


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.composed import ContrastiveObjective, scale_tau
    from neuclip_ds.objectives.normalizers.amortized import AmortizedNormalizer
    from neuclip_ds.objectives.pair_loss import PairLoss
    from neuclip_ds.objectives.temperature import RescaledTemperature

    normalizer = AmortizedNormalizer(config.section(AmortizedConfig), context)
    temperature = RescaledTemperature(config.temperature, context)
    return ContrastiveObjective(config, context, PairLoss(), normalizer, temperature, scale_tau)


def slips(config: ObjectiveConfig) -> list[str]:
    amortized = config.section(AmortizedConfig)
    if amortized.start != "released_code" or amortized.stage2 != "ema" or amortized.max_ratio is not None:
        return []
    return [
        "objective.amortized.start=released_code with stage2=ema: until the EMA has followed, C/lambda is too large by "
        "up to exp(1/tau), and so are the gradients (1e15 at tau = 0.01). Set objective.amortized.max_ratio, for "
        "example to 10, or start=batch_mean; the released code has stage2=combined."
    ]


METHOD = Method(
    source="AmorLIP eq. 6",
    normalizer="MLP of the feature, lambda: exp(s_ii/tau)/lambda_i",
    temperature="its rescaled loss with (annealed) rho",
    compose=compose,
    slips=slips,
    sections={"amortized": AmortizedConfig},
    # The README script's schedule of tau; the rest is the paper's. The script also has positive_weight=1e-3 and
    # stage2=combined.
    defaults={"temperature": {"schedule": "third_below_0.03"}},
    starts={"temperature": {"initial": 0.07}},
    test_options={
        "": {"amortized": {"width": 0.5}},
        "combined_kl": {"amortized": {"width": 0.5, "stage2": "combined", "loss": "kl"}},
        "js": {"amortized": {"width": 0.5, "loss": "js", "max_ratio": 1.1}},
        "seldom": {"amortized": {"width": 0.5, "online_every": 2, "target_every": 1}},
    },
    float32_options={"amortized": {"stage2": "combined"}},  # the batch's own target instead of the fitted net
    search=Search({"temperature.rho": 6.5}),
)
