"""AmorLIP's nets, fitted by each rank to its own rows, are those that one process fits to all rows."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from amortization import DIM, MLP, TAU, log_partition
from build import batch, objective, pairs, step
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.options import AmortizedConfig

ROWS, STEPS, STEPS_PER_EPOCH = 12, 5, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "seldom": {"online_every": 2, "target_every": 1},
    "kl": {"loss": "kl", "max_grad_norm": 0.0},
    "js": {"loss": "js", "encoder_normalizer": "combined", "init": "released_code"},
}
COMMON = {"ema": 0.6, "previous_weight": 0.5, "previous_epochs": 1}


def global_batch(number: int, holes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(ROWS, d) images and texts, and which rows count: with holes, another number on each of two or three ranks."""
    image, text = pairs(ROWS, DIM, seed=number)
    valid = torch.ones(ROWS, dtype=torch.bool)
    if holes:
        valid[[0, 5]] = False
    if holes and number == STEPS - 1:  # the last of three ranks has none
        valid[8:] = False
    return image, text, valid


def train(communicator: Communicator, holes: bool) -> dict[str, Any]:
    """Steps of every variant on this rank's rows: the nets, and the feature gradients of the last step."""
    share = ROWS // communicator.world_size
    here = slice(communicator.rank * share, (communicator.rank + 1) * share)
    found = {}
    for name, options in OPTIONS.items():
        temperature = {"initial": TAU, "rho": 0.0, "lr": 0.0}
        method = objective("amorlip", communicator, DIM, temperature=temperature, amortized={**COMMON, **options})
        for number in range(STEPS):
            image, text, valid = (x[here] for x in global_batch(number, holes))
            result = method(batch(image, text, valid=valid), step(number, epoch=number // STEPS_PER_EPOCH))
        state = method.replicated_state()
        nets = {net: state[f"normalizer.{net}"] for net in ("online", "target", "previous")}
        found[name] = {**nets, "image": result.image, "text": result.text}
    return found


def whole(name: str, holes: bool) -> dict[str, Tensor]:
    """The same, with the nets fitted to all rows at once by autograd of the loss."""
    config = AmortizedConfig(**COMMON, **OPTIONS[name])
    target = previous = online = torch.zeros(MLP.size, dtype=torch.float64)
    for number in range(STEPS):
        image, text, valid = global_batch(number, holes)
        image, text = image[valid].requires_grad_(), text[valid].requires_grad_()
        features = torch.stack([image, text]).detach()
        log_total = log_target = log_partition(image, text, TAU, 1.0)
        epoch, within = divmod(number, STEPS_PER_EPOCH)
        if within == 0:
            previous = target
        if epoch > 0:
            log_target = torch.logaddexp(log_total + math.log(0.5), MLP(previous, features) + math.log(0.5))
        if within == 0:
            target = MLP.draw(epoch).double()
            if config.init == "batch_mean":
                target[-2:] += (log_target - MLP(target, features)).mean(dim=1)
            online = Parameter(target.clone())
            adam = torch.optim.Adam([online], lr=config.lr)
        for _ in range(config.inner_steps if within % config.online_every == 0 else 0):
            adam.zero_grad()
            fitting_loss(MLP(online, features), log_target, log_total, config).backward()
            assert online.grad is not None
            if config.max_grad_norm:  # torch's clipping divides by the norm plus 1e-6
                online.grad.mul_((config.max_grad_norm / online.grad.norm()).clamp(max=1))
            adam.step()
        if within % config.target_every == 0:
            target = torch.lerp(target, online.detach(), 1 - config.ema)
    log_lambda = MLP(target, features) if config.encoder_normalizer == "ema" else log_target
    loss = oracle.amorlip(image, text, torch.tensor(TAU, dtype=torch.float64), log_lambda, 1.0, 0.0)
    gradients = [torch.zeros(ROWS, DIM, dtype=torch.float64) for _ in range(2)]
    for rows, gradient in zip(gradients, torch.autograd.grad(loss, (image, text)), strict=True):
        rows[valid] = gradient
    nets = {"online": online.detach(), "target": target, "previous": previous}
    return {**nets, "image": gradients[0], "text": gradients[1]}


def fitting_loss(log_lambda: Tensor, log_target: Tensor, log_total: Tensor, config: AmortizedConfig) -> Tensor:
    """Sum over both directions; the divergences' terms are those of `normalizers/amortized.py`."""
    size = log_lambda.shape[1]
    squared = (log_lambda - log_target).square().sum() / size
    p, q = (log_total - log_lambda).exp(), (log_total - log_target).exp()
    if config.loss == "l2_log":
        return squared
    if config.loss == "kl":
        return (p * (log_target - log_lambda)).sum() / size**2 + 0.1 * squared
    m = (p + q) / 2
    return (p * (p / m).log() + q * (q / m).log()).sum() / (2 * size**2) + 0.1 * squared


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nets_are_those_of_all_rows(world_size: int, holes: bool) -> None:
    ranks = [train(Communicator(), holes)] if world_size == 1 else run_ranks(world_size, train, holes)
    for name in OPTIONS:
        wanted = whole(name, holes)
        for net in ("online", "target", "previous"):
            assert all(torch.equal(rank[name][net], ranks[0][name][net]) for rank in ranks), f"{name} {net}: one net"
            torch.testing.assert_close(ranks[0][name][net], wanted[net], rtol=0, atol=1e-9, msg=f"{name} {net}")
        for part in ("image", "text"):
            rows = torch.cat([rank[name][part] for rank in ranks])
            torch.testing.assert_close(rows, wanted[part], rtol=1e-9, atol=1e-10, msg=f"{name} {part}")
