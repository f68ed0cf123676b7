"""The encoders' optimizers."""

from typing import Any

import torch
from timm.optim import Lion
from torch import nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.engine.lamb import Lamb
from neuclip_ds.models.trained_parts import learning_rate_scales

Groups = list[dict[str, Any]]


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> Groups:
    """Return the trained parameters in two groups for each share `lr_scale` of the learning rate, the largest first.

    Matrices and embeddings decay; gains, biases and other vectors do not.
    """
    scales = learning_rate_scales(module, config)
    found: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found.setdefault((scales.get(name, 1.0), parameter.ndim >= 2), []).append(parameter)
    return [
        {"params": found[scale, matrix], "weight_decay": config.weight_decay if matrix else 0.0, "lr_scale": scale}
        for scale, matrix in sorted(found, reverse=True)
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to its share of `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the config names, over `parameter_groups`; the trainer sets its learning rate."""
    groups = parameter_groups(module, config)
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
