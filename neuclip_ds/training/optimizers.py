"""The encoders' optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from neuclip_ds.config import OptimizerConfig


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings decay; gains, biases and other vectors do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`; the trainer sets the learning rate before every step."""
    groups = [group for group in parameter_groups(module, config.weight_decay) if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
