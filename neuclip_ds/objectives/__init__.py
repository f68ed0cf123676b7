"""The objectives: every method of the table, composed of parts. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from neuclip_ds.objectives.config import ObjectiveConfig
from neuclip_ds.objectives.methods import METHODS, find_method
from neuclip_ds.objectives.temperature_config import AdamSettings

if TYPE_CHECKING:
    import torch

    from neuclip_ds.objectives.base import Context, Objective

__all__ = ["METHODS", "build_objective", "compose_objective", "find_method"]


class _AdamOptions(Protocol):
    betas: tuple[float, float]
    eps: float


class _RunOptions(Protocol):
    """The parts of a run's config that an objective needs."""

    @property
    def objective(self) -> ObjectiveConfig: ...

    @property
    def optimizer(self) -> _AdamOptions: ...


def build_objective(config: _RunOptions, context: Context, comm_dtype: torch.dtype) -> Objective:
    """Build the objective of a run.

    Args:
        config: the whole tree; the optimizer section gives the temperature's Adam its betas and epsilon.
        context: width, size of the data set, ranks.
        comm_dtype: precision in which features travel.
    """
    adam = AdamSettings(config.optimizer.betas, config.optimizer.eps)
    return compose_objective(config.objective, context._replace(comm_dtype=comm_dtype, adam=adam))


def compose_objective(config: ObjectiveConfig, context: Context) -> Objective:
    """Build the objective that `config.method` names, for a training loop without a `Config`."""
    return find_method(config.method).compose(config, context)
