"""Options and published settings of SogCLR, iSogCLR and FastCLIP; the equations are in fastclip.py."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from neuclip_ds.losses.method import Method, initial_temperature
from neuclip_ds.section import Section


class MovingAverageConfig(Section):
    gamma: Literal["cosine", "constant"] = "cosine"
    """Schedule of gamma, the weight of the current batch's estimate in the moving average: FastCLIP's cosine, or
    SogCLR's constant gamma_min. Gamma is 1 when a sample is first seen."""
    gamma_min: float = Field(0.2, gt=0, le=1)
    """Gamma at the end of the cosine, or in every epoch with gamma=constant."""
    gamma_epochs: float = Field(18, ge=0)
    """Number of epochs E over which gamma falls from 1 to gamma_min along a cosine; gamma changes once per epoch."""


SECTIONS = ("moving_average", "epoch_steps")

# SogCLR and iSogCLR as tuned on CC3M in FastCLIP's study of gamma, which also gives their initial temperature of 0.03
_TUNED_GAMMA = {"gamma": "constant", "gamma_min": 0.6}

METHODS = {
    "sogclr": Method(
        builder="fastclip.sogclr",
        sections=SECTIONS,
        defaults={"moving_average": _TUNED_GAMMA, "temperature": {"initial": 0.03}},
    ),
    "isogclr": Method(
        builder="fastclip.isogclr",
        sections=SECTIONS,
        defaults={
            "moving_average": _TUNED_GAMMA,
            "temperature": {"initial": 0.03, "lr": 1e-2, "schedule": "constant", "rho": 9.0},
        },
        has_individual_temperatures=True,
    ),
    # FastCLIP's study of temperatures; the README's script starts at 0.07
    "fastclip_v0": Method(builder="fastclip.fastclip_v0", sections=SECTIONS, defaults=initial_temperature(0.03)),
    # FastCLIP's study of gamma; the README's script starts at 0.07
    "fastclip_v1": Method(builder="fastclip.fastclip_v1", sections=SECTIONS, defaults=initial_temperature(0.03)),
    # tuned as in FastCLIP's study of temperatures
    "fastclip_v2": Method(
        builder="fastclip.fastclip_v2",
        sections=SECTIONS,
        defaults={"temperature": {"initial": 0.03, "schedule": "constant"}},
        has_individual_temperatures=True,
    ),
    # FastCLIP Table 7, whose values of rho were tuned with the released code (objective.reference=released_code)
    "fastclip_v3": Method(
        builder="fastclip.fastclip_v3",
        sections=SECTIONS,
        defaults={"temperature": {"initial": 0.07, "schedule": "third_below_0.03"}},
    ),
}
