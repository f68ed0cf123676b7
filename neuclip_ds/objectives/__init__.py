"""The methods: each is a composition of parts, and this table is the only place where one is named."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from neuclip_ds.config import Config, ObjectiveConfig, OptimizerConfig, TemperatureConfig
from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, Normalizer, Objective
from neuclip_ds.objectives.composed import ContrastiveObjective, Scale, scale_half, scale_one, scale_tau
from neuclip_ds.objectives.individual_temperature import IndividualTemperature
from neuclip_ds.objectives.normalizers.amortized import AmortizedNormalizer
from neuclip_ds.objectives.normalizers.batch import BatchNormalizer
from neuclip_ds.objectives.normalizers.moving_average import MovingAverageNormalizer
from neuclip_ds.objectives.normalizers.npn import NpnNormalizer
from neuclip_ds.objectives.normalizers.npn_mlp import MlpNpnNormalizer
from neuclip_ds.objectives.pair_loss import Hinge, Identity, OverBatch, PairLoss
from neuclip_ds.objectives.sigmoid import SigmoidObjective
from neuclip_ds.objectives.temperature import (
    ConstantTemperature,
    LogTemperature,
    RescaledTemperature,
    RobustTemperature,
    Temperature,
)

log = logging.getLogger(__name__)


class Method(Protocol):
    """How an objective is built, and which sections of its config it reads beside the common ones."""

    @property
    def sections(self) -> tuple[str, ...]: ...

    def build(self, config: Config, context: Context, comm_dtype: torch.dtype) -> Objective: ...


class Contrastive(NamedTuple):
    """A row of METHODS.md, table 1."""

    pair_loss: Callable[[ObjectiveConfig], PairLoss]
    normalizer: Callable[[ObjectiveConfig, Context], Normalizer]
    temperature: Callable[[TemperatureConfig, OptimizerConfig, Context], Temperature]
    scale: Scale
    released_scale: Scale  # the same where the released code differs
    sections: tuple[str, ...]

    def build(self, config: Config, context: Context, comm_dtype: torch.dtype) -> Objective:
        objective = config.objective
        return ContrastiveObjective(
            pair_loss=self.pair_loss(objective),
            normalizer=self.normalizer(objective, context),
            temperature=self.temperature(objective.temperature, config.optimizer, context),
            scale=self.scale if objective.scale == "paper" else self.released_scale,
            config=objective,
            context=context,
            comm_dtype=comm_dtype,
        )


class Sigmoid(NamedTuple):
    """SigLIP, which has no normaliser."""

    sections: tuple[str, ...] = ("siglip",)

    def build(self, config: Config, context: Context, comm_dtype: torch.dtype) -> Objective:
        return SigmoidObjective(config, context, comm_dtype)


def _average(temperature: Callable[..., Temperature], scale: Scale, pair_loss: type[PairLoss] = Identity) -> Method:
    """SogCLR's family: a moving average under some rule for tau."""
    # one global learnable tau is a factor of the loss in the code as well
    released = scale if temperature is RobustTemperature else scale_one
    return Contrastive(pair_loss, MovingAverageNormalizer, temperature, scale, released, ("moving_average",))


def _npn(config: ObjectiveConfig, context: Context) -> Normalizer:
    """NeuCLIP's network in the form that the config names."""
    forms: dict[str, Callable[[ObjectiveConfig, Context], Normalizer]] = {
        "prototypes": NpnNormalizer,
        "mlp": MlpNpnNormalizer,
    }
    return forms[config.npn.network](config, context)


METHODS: dict[str, Method] = {
    "openclip": Contrastive(Identity, BatchNormalizer, LogTemperature, scale_half, scale_half, ()),
    "siglip": Sigmoid(),
    "sogclr": _average(ConstantTemperature, scale_tau),
    "isogclr": _average(IndividualTemperature, scale_tau),
    "fastclip_v0": _average(LogTemperature, scale_one),
    "fastclip_v1": _average(ConstantTemperature, scale_tau),
    "fastclip_v2": _average(IndividualTemperature, scale_tau),
    "fastclip_v3": _average(RobustTemperature, scale_tau),
    "amorlip": Contrastive(Identity, AmortizedNormalizer, RescaledTemperature, scale_tau, scale_tau, ("amortized",)),
    "neuclip": Contrastive(Identity, _npn, RobustTemperature, scale_tau, scale_tau, ("npn",)),
    "gcl": _average(ConstantTemperature, scale_tau, OverBatch),
    "tuneclip": _average(ConstantTemperature, scale_tau, Hinge),
}


def find_method(name: str) -> Method:
    """The composition of that name.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name not in METHODS:
        nearest = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "choose one."
        raise UserError(f"objective.method={name} is unknown; the methods are {', '.join(METHODS)}; {hint}")
    return METHODS[name]


def build_objective(config: Config, context: Context, comm_dtype: torch.dtype) -> Objective:
    """The objective that the config names.

    Args:
        config: the whole tree; the optimizer section gives the temperature's Adam its betas and epsilon.
        context: width, data set size, ranks.
        comm_dtype: precision in which features travel.
    """
    return find_method(config.objective.method).build(config, context, comm_dtype)
