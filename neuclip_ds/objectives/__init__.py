"""The objectives: every method of the table, composed of parts. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuclip_ds.objectives.config import ObjectiveConfig
from neuclip_ds.objectives.methods import METHODS, find_method
from neuclip_ds.objectives.temperature_config import AdamSettings

if TYPE_CHECKING:
    import torch

    from neuclip_ds.objectives.base import Context, Objective

__all__ = ["METHODS", "build_objective", "compose_objective", "find_method"]


def build_objective(config: Any, context: Context, comm_dtype: torch.dtype) -> Objective:
    """Build the objective of a run.

    Args:
        config: a `Config`, of a layer above; its optimizer section has betas and epsilon of the temperature's Adam.
        context: width, size of the data set, ranks.
        comm_dtype: precision in which features travel.
    """
    adam = AdamSettings(config.optimizer.betas, config.optimizer.eps)
    return compose_objective(config.objective, context._replace(comm_dtype=comm_dtype, adam=adam))


def compose_objective(config: ObjectiveConfig, context: Context) -> Objective:
    """Build the objective that `config.method` names, for a training loop without a `Config`."""
    return find_method(config.method).compose(config, context)
