"""NeuCLIP: a network predicts the normalisers (ICLR 2026, eq. 10-12 and Algorithm 1).

    L = tau/n sum_i sum_{1, 2} [ exp(-alpha_i) (eps + g_i) + alpha_i - 1 ] + 2 rho tau,   w_i = exp(-alpha_i)
    alpha1_i = log(eps + 1/m sum_k exp((cos(e1_i, W1_k) - s_ii)/tau)),   alpha2_i likewise with e2_i and W2

normalizers/npn.py holds the equations and the algorithm line by line. tau follows dL/dtau
(temperature.RobustTemperature).
"""

from typing import Any, Literal

from pydantic import Field

from neuclip_ds.errors import UserError
from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search
from neuclip_ds.objectives.prototypes_config import PrototypesConfig


class NpnConfig(PrototypesConfig):
    network: Literal["prototypes", "mlp"] = "prototypes"
    """Form of the network: prototypes (NeuCLIP eq. 10), or AmorLIP's MLP fitted to the same objective (ablation)."""
    mlp_lr: float = Field(1e-3, gt=0)
    """Adam's learning rate with network=mlp."""
    updates: int = Field(10, ge=0)
    """AdaGrad updates T_u per step."""
    restart_every: int = Field(500, ge=0)
    """Steps T_r between re-draws of the columns from recent features; 0 draws them once."""
    lr: float = Field(1.0, gt=0)
    """AdaGrad learning rate. The published 1.0 holds for B >= 1024 and m = 4096; use a smaller one below."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of the network: coupled with the gradient in AdaGrad and in the MLP's Adam, decoupled with
    order=joint. NeuCLIP searched 0 to 1 and has 0."""
    initial_accumulator: float = Field(0.0, ge=0)
    """AdaGrad's accumulator at the start."""
    reset_accumulator: bool = False
    """Also reset AdaGrad's accumulator at a restart."""
    restart_with: Literal["current", "earlier"] = "current"
    """Samples that a re-draw takes: the current batch where it has m pairs (Algorithm 1), or always those before it."""
    alpha_grad: Literal["full", "positive", "stop"] = "full"
    """How much of alpha's gradient encoders and tau get: all of it (NeuCLIP eq. 12), its part along the positive, or
    none."""
    max_ratio: float | None = Field(None, gt=0)
    """Bound on (eps + g)/(eps + ghat), with which an anchor's negatives weigh. By default none (NeuCLIP)."""
    objective: Literal["unified", "separate"] = "unified"
    """Objective that the network is fitted to: the loss itself, or (alpha - log(eps + g))^2 (ablation)."""
    order: Literal["alternating", "simultaneous", "joint"] = "alternating"
    """Update the network first and the encoders with its new prediction, or both from the old one: `simultaneous` with
    T_u AdaGrad updates, `joint` with one AdamW step at the encoders' learning rate (Algorithm 3, ablation)."""


def compose(config: ObjectiveConfig, context: Context) -> Objective:
    from neuclip_ds.objectives.composed import ContrastiveObjective
    from neuclip_ds.objectives.global_loss import global_loss
    from neuclip_ds.objectives.normalizers.npn import NpnNormalizer
    from neuclip_ds.objectives.normalizers.npn_joint import JointNpnNormalizer
    from neuclip_ds.objectives.normalizers.npn_mlp import MlpNpnNormalizer
    from neuclip_ds.objectives.pair_loss import PairLoss

    npn = config.section(NpnConfig)
    if npn.order == "joint" and npn.network == "mlp":
        raise UserError("objective.npn.order=joint is for prototypes; with objective.npn.network=mlp use simultaneous.")
    prototypes = JointNpnNormalizer if npn.order == "joint" else NpnNormalizer
    loss = global_loss(config, context)
    network = (MlpNpnNormalizer if npn.network == "mlp" else prototypes)(npn, loss.eps, context)
    return ContrastiveObjective(config, context, PairLoss(), network, loss.temperature, loss.scale, loss.constant)


# 7 prototypes: no world size divides them. A warm accumulator: from zero, AdaGrad's first step is a sign.
_SMALL: dict[str, Any] = {
    "prototypes": 7, "updates": 3, "restart_every": 3, "lr": 0.1, "initial_accumulator": 0.1,
}  # fmt: skip
METHOD = Method(
    source="NeuCLIP eq. 10-12",
    normalizer="network (NPN) that predicts alpha_i: exp(-alpha_i)",
    temperature="RGCL-g with rho, or learned without it",
    compose=compose,
    sections={"npn": NpnConfig},
    has_temperature_rule=True,
    # NeuCLIP Table 3. tau's start and schedule are not published: 0.07, and the encoders' schedule because its learning
    # rate is an eighth of theirs on every data set.
    starts={"temperature": {"initial": 0.07}},
    test_options={
        "": {"eps": 1e-6, "npn": _SMALL},
        "positive": {"npn": {**_SMALL, "alpha_grad": "positive", "max_ratio": 0.9}},
        "stop": {"npn": {**_SMALL, "alpha_grad": "stop", "restart_with": "earlier"}},
        "no_rho": {"npn": _SMALL, "temperature": {"rule": "learned"}},
        "mlp": {"npn": {"network": "mlp", "updates": 2}},
        "joint": {"npn": {**_SMALL, "order": "joint", "weight_decay": 0.1}},
    },
    # a network without a fit has ratios that float32 bounds and float64 does not
    float32_options={"npn": {"updates": 0, "prototypes": 32, "max_ratio": 1e6}},
    search=Search({"temperature.rho": 6.5}),
)
