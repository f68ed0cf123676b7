"""What decays and what does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.training.lamb import Lamb
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


def test_lamb_follows_its_formula() -> None:
    """Two steps: Adam's direction plus decay, rescaled to the parameter's norm; vectors keep Adam's step."""
    net = module()
    config = OptimizerConfig(name="lamb", lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-3)
    optimizer = build_optimizer(net, config)
    wanted = [p.detach().clone() for p in net.parameters()]
    m, v = ([torch.zeros_like(p) for p in wanted] for _ in range(2))
    for number in (1, 2):
        for i, p in enumerate(net.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i))
            m[i] = 0.8 * m[i] + 0.2 * p.grad
            v[i] = 0.9 * v[i] + 0.1 * p.grad**2
            update = (m[i] / (1 - 0.8**number)) / ((v[i] / (1 - 0.9**number)).sqrt() + 1e-3)
            if p.ndim > 1:
                update = update + 0.2 * wanted[i]
                update = update * wanted[i].norm() / update.norm()
            wanted[i] = wanted[i] - 0.1 * update
        optimizer.step()
    for p, value in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "sgd"])
def test_every_optimizer_takes_every_parameter_once(name: str) -> None:
    net = module()
    optimizer = build_optimizer(net, OptimizerConfig(name=name))
    found = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in net.parameters())
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups for p in group["params"] if p.ndim < 2)


def test_a_zero_weight_moves_by_the_plain_step() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.ones(2, 2)
    Lamb([{"params": [p]}], lr=0.1, betas=(0.9, 0.99), eps=0.0).step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), -0.1))
