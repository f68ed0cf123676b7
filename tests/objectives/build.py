"""Random features and objectives for the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives import METHODS, build_objective
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.gather import Features

SAMPLES = 1000
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}_{variant}" if variant else name: (name, dict(options))
    for name, method in METHODS.items()
    for variant, options in method.test_options.items()
}
"""Every method of the table with each of its test options."""


def objective(
    method: str, communicator: Communicator, dim: int, dtype: torch.dtype = torch.float64, **options: Any
) -> Objective:
    config = Config.model_validate({"objective": {"method": method, **options}, "optimizer": {"eps": 1e-8}})
    return build_objective(config, Context(dim, SAMPLES, communicator, dtype), comm_dtype=dtype)


def pairs(rows: int, dim: int, seed: int = 0, likeness: float = 1.0) -> tuple[Tensor, Tensor]:
    """Normalised (rows, dim) images and texts whose partners resemble each other."""
    generator = torch.Generator().manual_seed(seed)
    shared, a, b = torch.randn(3, rows, dim, generator=generator, dtype=torch.float64)
    return normalize(likeness * shared + a, dim=1), normalize(likeness * shared + b, dim=1)


def batch(image: Tensor, text: Tensor, index: Tensor | None = None, valid: Tensor | None = None) -> Features:
    rows = len(image)
    return Features(
        image,
        text,
        torch.arange(rows) if index is None else index,
        torch.ones(rows, dtype=torch.bool) if valid is None else valid,
    )


def step(number: int = 0, epoch: int = 0, lr: float = 1e-3) -> Step:
    return Step(number, epoch, lr, 1e-3)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
