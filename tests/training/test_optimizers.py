"""What decays and what does not."""

from __future__ import annotations

import torch
from torch import nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.training.optimizers import build_optimizer, parameter_groups


def module() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1, bias=False))


def test_gains_and_biases_do_not_decay() -> None:
    net = module()
    decayed, free = parameter_groups(net, 0.2)
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 4), (4, 4), (4, 4, 1)]
    assert [tuple(p.shape) for p in free["params"]] == [(4,), (4,), (4,)]
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.2, 0.0)


def test_frozen_parameters_have_no_optimizer() -> None:
    net = module()
    net[1].requires_grad_(False)
    optimized = {id(p) for group in build_optimizer(net, OptimizerConfig()).param_groups for p in group["params"]}
    assert optimized == {id(p) for p in net.parameters() if p.requires_grad}


def test_decay_is_decoupled() -> None:
    """Without gradient AdamW shrinks matrices by lr x decay and leaves vectors."""
    net = module()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = build_optimizer(net, OptimizerConfig(lr=0.5, weight_decay=0.2))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old * (0.9 if p.ndim > 1 else 1.0))
