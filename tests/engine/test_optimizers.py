"""Test the encoders' optimizers: which parameters decay, LAMB's formula, and equal steps under every ZeRO stage."""

from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import Layers, gathered_weights, small_engine
from torch import Tensor, nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.lamb import Lamb
from neuclip_ds.engine.start import build_optimizer

NAMES = ("adamw", "lamb", "lion", "sgd")
LR, DECAY, BETA1, BETA2, EPS, MOMENTUM = 0.1, 0.2, 0.8, 0.9, 1e-3, 0.7
ROWS, STEPS = 8, 3
Case = tuple[str, str]  # optimizer, name in ds_configs/


def module() -> Layers:
    """Return a module whose parameters two ranks cannot all split evenly."""
    return Layers(nn.Embedding(5, 3), nn.Linear(3, 5), nn.LayerNorm(5), nn.Conv1d(4, 7, 1, bias=False))


def config_of(name: str) -> OptimizerConfig:
    return OptimizerConfig.model_validate(
        {"name": name, "lr": LR, "weight_decay": DECAY, "betas": (BETA1, BETA2), "eps": EPS, "momentum": MOMENTUM}
    )


def test_frozen_parameters_are_not_optimized() -> None:
    net = module()
    net[1].requires_grad_(False)
    optimized = {id(p) for group in build_optimizer(net, OptimizerConfig()).param_groups for p in group["params"]}
    assert optimized == {id(p) for p in net.parameters() if p.requires_grad}


def adam_direction(grads: list[Tensor]) -> Tensor:
    """Return Adam's update (Loshchilov & Hutter 2019, Algorithm 2, lines 7-10); moments are sums over all gradients."""
    t = len(grads)
    m = sum(BETA1 ** (t - k) * (1 - BETA1) * g for k, g in enumerate(grads, 1))
    v = sum(BETA2 ** (t - k) * (1 - BETA2) * g**2 for k, g in enumerate(grads, 1))
    return (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)) ** 0.5 + EPS)


def lamb(p: Tensor, grads: list[Tensor], decay: float) -> Tensor:
    """Return `p` after a LAMB step (You et al. 2020, Algorithm 2); a vector's trust ratio is 1."""
    update = adam_direction(grads) + decay * p
    return p - LR * update * (p.norm() / update.norm() if p.ndim > 1 else 1.0)


def test_lamb_follows_its_papers_formula() -> None:
    """Three steps in float64 equal LAMB's formula; weight decay does not apply to vectors."""
    torch.manual_seed(0)
    net = module().double()
    optimizer = build_optimizer(net, config_of("lamb"))
    wanted = [p.detach().clone() for p in net.parameters()]
    grads: list[list[Tensor]] = [[] for _ in wanted]
    for _ in range(STEPS):
        for number, p in enumerate(net.parameters()):
            p.grad = torch.randn_like(p)
            grads[number].append(p.grad.clone())
            wanted[number] = lamb(wanted[number], grads[number], DECAY if p.ndim > 1 else 0.0)
        optimizer.step()
    for p, expected in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"betas": (BETA1, BETA2), "eps": EPS}),
        ("lion", {"betas": (BETA1, BETA2)}),
        ("sgd", {"momentum": MOMENTUM, "nesterov": False, "dampening": 0}),
    ],
)
def test_optimizers_of_libraries_get_the_configs_options(name: str, options: dict[str, Any]) -> None:
    for group in build_optimizer(module(), config_of(name)).param_groups:
        assert {key: group[key] for key in options} == options and group["lr"] == LR
        for p in group["params"]:
            assert group["weight_decay"] == (DECAY if p.ndim > 1 else 0.0)


def test_a_zero_weight_has_trust_ratio_one() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.ones(2, 2)
    Lamb([{"params": [p]}], lr=0.1, betas=(0.9, 0.99), eps=0.0).step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), -0.1))


def tokens(step: int) -> Tensor:
    return torch.randint(0, 5, (ROWS, 4), generator=torch.Generator().manual_seed(step))  # (B, 4)


def loss_of(net: Any, rows: Tensor) -> Tensor:
    return (net(rows, None) + 0.5).square().mean()


def learning_rate(step: int) -> float:
    return LR * (1 - step / STEPS)


def plain(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = module()
    optimizer = build_optimizer(net, config_of(name))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss_of(net, tokens(step)).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def under_zero(communicator: Communicator, cases: list[Case]) -> dict[Case, tuple[list[Tensor], int]]:
    """Return the weights after all steps and the number of the optimizer's collectives in the last step."""
    # uninitialized memory, such as DeepSpeed's padding, is filled with NaN
    torch.use_deterministic_algorithms(True, warn_only=True)
    share = ROWS // communicator.world_size
    rows = slice(communicator.rank * share, (communicator.rank + 1) * share)
    results = {}
    for name, engine_name in cases:
        torch.manual_seed(0)
        net = module()
        engine = small_engine(net, config_of(name), engine_name, ROWS, communicator)
        for step in range(STEPS):
            before = communicator.traffic["optimizer"].calls
            engine.backward(loss_of(engine, tokens(step)[rows].to(communicator.device)))
            engine.step(learning_rate(step))
        weights = [weight.float() for weight in gathered_weights(net).values()]
        results[name, engine_name] = weights, communicator.traffic["optimizer"].calls - before
    return results


QUICK: list[Case] = [  # LAMB depends on the shards; the other optimizers update each element alike
    *[("lamb", f"zero{stage}_fp32") for stage in range(4)],
    ("lamb", "zero1_bf16"),
    ("adamw", "zero3_fp32"),
    ("lion", "zero2_fp32"),
    ("sgd", "zero1_fp32"),
]
OTHERS = [
    (name, f"zero{stage}_{precision}")
    for name, stage, precision in product(NAMES, range(4), ("fp32", "bf16"))
    if (name, f"zero{stage}_{precision}") not in QUICK
]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_zero_stages_step_as_plain_pytorch(cases: list[Case]) -> None:
    """Every optimizer steps under ZeRO 0-3 on two ranks as in plain PyTorch; shard boundaries split parameters.

    The learning rate changes at each step. Numbers from 2 to 4 are 0.016 apart in bf16.
    """
    for results in run_ranks(2, under_zero, cases):
        for (name, engine), (weights, collectives) in results.items():
            assert collectives == (name == "lamb" and not engine.startswith("zero0")), f"{name} {engine}"
            tolerance = 1e-5 if engine.endswith("fp32") else 0.03
            for value, wanted in zip(weights, plain(name), strict=True):
                torch.testing.assert_close(value, wanted, rtol=0, atol=tolerance, msg=f"{name} {engine}")


def after_clearing(communicator: Communicator, cases: list[Case]) -> dict[Case, list[list[Tensor]]]:
    """Return the weights after two steps of a new engine, and of an engine whose first step and state are discarded."""
    share = ROWS // communicator.world_size
    rows = slice(communicator.rank * share, (communicator.rank + 1) * share)
    results: dict[Case, list[list[Tensor]]] = {}
    for name, engine_name in cases:
        config = config_of(name)
        if engine_name.startswith("lean_"):
            config = config.model_copy(update={"lean_zero1": True})
        results[name, engine_name] = []
        for is_new in (True, False):
            torch.manual_seed(0)
            net = module()
            engine = small_engine(net, config, engine_name.removeprefix("lean_"), ROWS, communicator)
            if not is_new:
                engine.backward(loss_of(engine, tokens(2)[rows].to(communicator.device)))
                engine.step(0.0)  # the moments change, but not the weights
                assert engine.optimizer_state
                engine.clear_optimizer_state()
            for step in range(2):
                engine.backward(loss_of(engine, tokens(step)[rows].to(communicator.device)))
                engine.step(learning_rate(step))
            results[name, engine_name].append([weight.float() for weight in gathered_weights(net).values()])
    return results


CLEARED: list[Case] = [
    ("lamb", "zero0_fp32"),
    ("adamw", "zero0_bf16"),
    ("sgd", "zero1_fp32"),
    ("adamw", "lean_zero1_bf16"),
    ("adamw", "zero2_bf16_offload"),
    ("lamb", "zero3_fp32"),
    ("lion", "zero3_bf16_offload"),
]


def test_without_its_optimizer_state_an_engine_steps_as_a_new_one() -> None:
    for results in run_ranks(2, after_clearing, CLEARED):
        for case, (new, cleared) in results.items():
            assert all(torch.equal(*pair) for pair in zip(new, cleared, strict=True)), case
