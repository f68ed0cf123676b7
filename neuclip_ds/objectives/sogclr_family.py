"""SogCLR's family: what the methods whose normaliser is a moving average share; free of torch.

w_i = 1 / (eps + u_i),   u_i <- (1 - gamma) u_i + gamma g_i   (FastCLIP eq. 1; normalizers/moving_average.py)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from neuclip_ds.section import Section

if TYPE_CHECKING:
    from neuclip_ds.objectives.base import Context
    from neuclip_ds.objectives.composed import ContrastiveObjective, Scale
    from neuclip_ds.objectives.config import ObjectiveConfig
    from neuclip_ds.objectives.pair_loss import PairLoss
    from neuclip_ds.objectives.temperature import Temperature


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


SECTIONS = {"moving_average": MovingAverageConfig}
COSINE, CONSTANT = "u_i, cosine gamma: 1/(eps + u_i)", "u_i, constant gamma: 1/(eps + u_i)"  # in the docs' table
TEST_OPTIONS: dict[str, dict[str, Any]] = {"": {"eps": 1e-6, "moving_average": {"gamma_min": 0.3, "gamma_epochs": 2}}}
TUNED_GAMMA = {"gamma": "constant", "gamma_min": 0.6}  # of SogCLR and iSogCLR, FastCLIP's study of gamma
CONSTANT_GAMMA = {f"moving_average.{key}": value for key, value in TUNED_GAMMA.items()}
INDIVIDUAL = {"temperature.rho": 7.0, "temperature.lr": 1e-3, "temperature.schedule": "constant"}


def compose_average(
    config: ObjectiveConfig,
    context: Context,
    temperature: Temperature,
    scale: Scale | None = None,
    pair_loss: PairLoss | None = None,
) -> ContrastiveObjective:
    """Compose an objective of this family.

    Args:
        config, context: as `Method.compose` takes them.
        temperature: rule for tau.
        scale: leading factor; None for tau, which is 1 in FastCLIP's released code.
        pair_loss: l; None for the identity.
    """
    from neuclip_ds.objectives.composed import ContrastiveObjective, scale_one, scale_tau
    from neuclip_ds.objectives.normalizers.moving_average import MovingAverageNormalizer
    from neuclip_ds.objectives.pair_loss import Identity

    return ContrastiveObjective(
        config,
        context,
        pair_loss=pair_loss or Identity(),
        normalizer=MovingAverageNormalizer(config.section(MovingAverageConfig), config.eps, context),
        temperature=temperature,
        scale=scale or (scale_tau if config.scale == "paper" else scale_one),
    )
