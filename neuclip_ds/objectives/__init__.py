"""The methods: each is a composition of parts, and this table is the only place where one is named."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.config import Config, ObjectiveConfig
from neuclip_ds.errors import UserError
from neuclip_ds.objectives.base import Context, Normalizer, Objective
from neuclip_ds.objectives.composed import ContrastiveObjective, by_tau, half
from neuclip_ds.objectives.normalizers.batch import BatchNormalizer
from neuclip_ds.objectives.normalizers.moving_average import MovingAverageNormalizer
from neuclip_ds.objectives.normalizers.npn import NpnNormalizer
from neuclip_ds.objectives.pair_loss import Identity, PairLoss
from neuclip_ds.objectives.temperature import LogTemperature, RobustTemperature, Temperature

log = logging.getLogger(__name__)


class Method(NamedTuple):
    """A row of METHODS.md, table 1."""

    pair_loss: Callable[[], PairLoss]
    normalizer: Callable[[ObjectiveConfig, Context], Normalizer]
    temperature: Callable[..., Temperature]
    scale: Callable[[Tensor], Tensor]
    sections: tuple[str, ...]  # of the objective's config that this composition reads, beside the common ones


METHODS = {
    "openclip": Method(Identity, BatchNormalizer, LogTemperature, half, ()),
    "fastclip_v3": Method(Identity, MovingAverageNormalizer, RobustTemperature, by_tau, ("moving_average",)),
    "neuclip": Method(Identity, NpnNormalizer, RobustTemperature, by_tau, ("npn",)),
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


def build_objective(config: Config, context: Context, wire: torch.dtype) -> Objective:
    """The objective that the config names.

    Args:
        config: the whole tree; the optimizer section gives the temperature's Adam its betas and epsilon.
        context: width, data set size, ranks.
        wire: precision in which features travel.
    """
    objective = config.objective
    method = find_method(objective.method)
    return ContrastiveObjective(
        pair_loss=method.pair_loss(),
        normalizer=method.normalizer(objective, context),
        temperature=method.temperature(objective.temperature, config.optimizer, context),
        scale=method.scale,
        config=objective,
        context=context,
        wire=wire,
    )
