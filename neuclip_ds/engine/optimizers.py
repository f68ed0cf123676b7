"""The encoders' optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import Lion
from torch import nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.lamb import Lamb

Groups = list[dict[str, Any]]


def parameter_groups(module: nn.Module, weight_decay: float) -> Groups:
    """Two groups: matrices and embeddings decay; gains, biases and other vectors do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, shards: Communicator | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the config names, over `parameter_groups`; the trainer sets its learning rate at every step.

    Args:
        module: the encoders.
        config: name and constants.
        shards: the ranks over which ZeRO will partition parameters or their masters; None where it will not.
    """
    return _BUILDERS[config.name](parameter_groups(module, config.weight_decay), config, shards)


def _adamw(groups: Groups, config: OptimizerConfig, shards: Communicator | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _lamb(groups: Groups, config: OptimizerConfig, shards: Communicator | None) -> torch.optim.Optimizer:
    """Vectors keep Adam's step (trust ratio 1), as in EVA-CLIP."""
    single = [
        {"params": [p], "weight_decay": group["weight_decay"], "adapt": p.ndim >= 2}
        for group in groups
        for p in group["params"]
    ]
    return Lamb(single, lr=config.lr, betas=config.betas, eps=config.eps, communicator=shards)


def _lion(groups: Groups, config: OptimizerConfig, shards: Communicator | None) -> torch.optim.Optimizer:
    return Lion(groups, lr=config.lr, betas=config.betas)


def _sgd(groups: Groups, config: OptimizerConfig, shards: Communicator | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


_BUILDERS: dict[str, Callable[[Groups, OptimizerConfig, Communicator | None], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "lamb": _lamb,
    "lion": _lion,
    "sgd": _sgd,
}
