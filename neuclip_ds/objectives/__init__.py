"""The table of methods, and the function that builds an objective. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuclip_ds.objectives.methods import METHODS, find_method
from neuclip_ds.objectives.options import AdamSettings

if TYPE_CHECKING:
    import torch

    from neuclip_ds.objectives.base import Context, Objective

__all__ = ["METHODS", "build_objective", "find_method"]


def build_objective(config: Any, context: Context, comm_dtype: torch.dtype) -> Objective:
    """Build the training objective of a run.

    Args:
        config: the run's `Config`; its optimizer section has the Adam betas and epsilon for the temperature.
        context: sizes, communicator and settings.
        comm_dtype: dtype in which features are sent between ranks.
    """
    from neuclip_ds.objectives.compose import compose_objective  # imports torch

    adam = AdamSettings(config.optimizer.betas, config.optimizer.eps)
    return compose_objective(config.objective, context._replace(comm_dtype=comm_dtype, adam=adam))
