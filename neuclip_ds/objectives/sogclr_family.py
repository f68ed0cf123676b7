"""SogCLR's family: what the methods whose normaliser is a moving average share; free of torch.

w_i = 1 / (eps + u_i),   u_i <- (1 - gamma) u_i + gamma g_i   (FastCLIP eq. 1; normalizers/moving_average.py)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from neuclip_ds.objectives.method import Context, Method, Objective, ObjectiveConfig, Search
from neuclip_ds.section import Section

if TYPE_CHECKING:
    from neuclip_ds.objectives.pair_loss import PairLoss


class MovingAverageConfig(Section):
    follows_epochs = True
    gamma: Literal["cosine", "constant"] = "cosine"
    """Schedule of gamma: FastCLIP's cosine, or SogCLR's constant gamma_min. A sample's first visit always takes 1."""
    gamma_min: float = Field(0.2, gt=0, le=1)
    """Weight of the new estimate at the end of the schedule."""
    gamma_epochs: float = Field(18, ge=0)
    """Epochs E over which gamma falls from 1 to gamma_min on a cosine, in steps of one epoch."""
    gamma_epoch_steps: int | None = Field(None, ge=1)
    """Training steps that count as an epoch of this schedule, for runs that see each sample about once. By default
    those of the data."""
    drift_rate: float = Field(0.0, ge=0, le=1)
    """Weight of a batch in the running mean of log g that log u is kept relative to, so that u follows what all
    samples' g do between two visits; 0 keeps u itself (FastCLIP)."""


Rule = Literal["constant", "log", "robust", "individual"]
_IN_THE_DOCS: dict[Rule, tuple[str, str]] = {  # scale and temperature by the rule for tau
    "constant": ("tau", "constant"),
    "log": ("1", "learnable, gradient of the loss"),
    "robust": ("tau", "RGCL-g with rho"),
    "individual": ("tau_i", "one for each sample and direction"),
}
SECTIONS: dict[str, type[Section]] = {"moving_average": MovingAverageConfig}
CONSTANT = "u_i, constant gamma: 1/(eps + u_i)"  # in the docs' table
TUNED_GAMMA = {"gamma": "constant", "gamma_min": 0.6}  # of SogCLR and iSogCLR, FastCLIP's study of gamma
CONSTANT_GAMMA = {f"moving_average.{key}": value for key, value in TUNED_GAMMA.items()}
TEST_OPTIONS = {"": {"eps": 1e-6, "moving_average": {"gamma_min": 0.3, "gamma_epochs": 2}}}
INDIVIDUAL = {"temperature.rho": 7.0, "temperature.lr": 1e-3, "temperature.schedule": "constant"}


def average_method(rule: Rule, **fields: Any) -> Method:
    """Describe a method of this family by its rule for tau and its own fields of `Method`."""
    scale, temperature = _IN_THE_DOCS[rule]
    family = {
        "normalizer": "u_i, cosine gamma: 1/(eps + u_i)",
        "scale": scale,
        "temperature": temperature,
        "compose": partial(compose_average, rule=rule),
        "sections": SECTIONS,
        "test_options": TEST_OPTIONS,
        "search": Search(),
    }
    return Method(**{**family, **fields})


def compose_average(
    config: ObjectiveConfig, context: Context, rule: Rule, pair_loss: PairLoss | None = None
) -> Objective:
    """Compose an objective of this family; without a pair loss l it is the identity."""
    from neuclip_ds.objectives import temperature
    from neuclip_ds.objectives.composed import ContrastiveObjective, scale_one, scale_tau
    from neuclip_ds.objectives.individual_temperature import IndividualTemperature
    from neuclip_ds.objectives.normalizers.moving_average import MovingAverageNormalizer
    from neuclip_ds.objectives.pair_loss import PairLoss

    by_config = scale_tau if config.scale == "paper" else scale_one  # 1 in FastCLIP's released code
    rules = {
        "constant": (temperature.ConstantTemperature, by_config),
        "log": (temperature.LogTemperature, scale_one),
        "robust": (temperature.RobustTemperature, scale_tau),
        "individual": (IndividualTemperature, by_config),
    }
    kind, scale = rules[rule]
    normalizer = MovingAverageNormalizer(config.section(MovingAverageConfig), config.eps, context)
    return ContrastiveObjective(
        config, context, pair_loss or PairLoss(), normalizer, kind(config.temperature, context), scale
    )
