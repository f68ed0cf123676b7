"""The encoders' optimizers."""

from typing import Any

import torch
from timm.optim import Lion
from torch import nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.engine.lamb import Lamb

Groups = list[dict[str, Any]]


def parameter_groups(module: nn.Module, weight_decay: float) -> Groups:
    """Return two groups: matrices and embeddings decay; gains, biases and other vectors do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the config names, over `parameter_groups`; the trainer sets its learning rate."""
    groups = parameter_groups(module, config.weight_decay)
    match config.name:
        case "adamw":  # fused, a step reads and writes each number once, also that of offloaded masters on the CPU
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        case "lamb":  # vectors keep Adam's step (trust ratio 1), as in EVA-CLIP
            adapted = [{**group, "adapt": group["params"][0].ndim >= 2} for group in groups]
            return Lamb(adapted, lr=config.lr, betas=config.betas, eps=config.eps)
        case "lion":
            return Lion(groups, lr=config.lr, betas=config.betas)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
