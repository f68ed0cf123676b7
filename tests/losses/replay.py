"""Run a page's code, and train with the project's `TrainStep` on the batches that the page's loss received."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from neuclip_ds.objectives import build_objective
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize
from torch.nn.modules.module import register_module_forward_pre_hook

from neuclip_ds.config import Config
from neuclip_ds.data.loader import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.engine import Engine
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.losses.base import Context, Step
from neuclip_ds.training.step import TrainStep

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own_loop.md"
DIM, SAMPLES, LR, EPOCHS = 6, 48, 1e-3, 2
# with 7 prototypes, the NPN makes predictions from the second step on
OPTIONS: dict[str, dict[str, Any]] = {
    "neuclip": {"npn": {"prototypes": 7, "inner_steps": 3}},
    "fastclip_v3": {"temperature": {"rho": 2.0}},
}
# per-sample statistics on one process and prototypes on two; the slow cases swap the numbers of processes
METHODS_AND_RANKS = [
    ("fastclip_v3", 1),
    ("neuclip", 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fastclip_v3", 2), ("neuclip", 1))),
]
# launcher variables; their values are unused because the process group already exists
RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class Call(NamedTuple):
    index: Tensor
    lr: float


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # from the last step, if the loop keeps them
    temperature: float
    calls: list[Call]  # this rank's calls to the loss in training mode

    @classmethod
    def of(cls, model: nn.Module, temperature: float, calls: list[Call]) -> Trained:
        learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        weights = {name: whole(weight.detach()).clone() for name, weight in learned.items()}
        gradients = {name: whole(w.grad).clone() for name, w in learned.items() if w.grad is not None}
        return cls(weights, gradients, temperature, calls)


def whole(value: Tensor) -> Tensor:
    """Return the full value of a tensor that FSDP2 may have sharded; all ranks must call this together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def code_blocks(heading: str) -> list[str]:
    """Return the Python code blocks below a heading on the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def run_code(code: str, method: str, names: dict[str, Any], changes: Mapping[str, str] = {}) -> dict[str, Any]:
    """Run a page's code with a given method and return the code's globals; `changes` maps old code to new code."""
    for before, after in {'"fastclip_v3", ': f'"{method}", **options, ', **changes}.items():
        assert before in code
        code = code.replace(before, after).replace("dim=512", f"dim={DIM}")
    names = {**names, "options": OPTIONS[method]}
    exec(compile(code, "page", "exec"), names)
    return names


class Encoders(nn.Module):
    """Two small towers in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, DIM)) for _ in range(2))
        self.double()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1)


def pairs(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images, noise = torch.randn(2, SAMPLES, 8, generator=generator, dtype=torch.float64)
    return list(zip(images, images + noise, strict=True))


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the index and the learning rate of each call to a loss in training mode."""
    calls: list[Call] = []

    def record(module: nn.Module, args: Any) -> None:
        if isinstance(module, ContrastiveLoss) and module.training and torch.is_grad_enabled():
            calls.append(Call(args[2].clone(), module.lr))

    handle = register_module_forward_pre_hook(record)
    try:
        yield calls
    finally:
        handle.remove()


class PlainEngine:
    """The part of DeepSpeed's engine that the trainer uses, for one rank and in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = model, optimizer
        self.basic_optimizer = optimizer  # without ZeRO
        self.skipped_steps = 0

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        pass

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()


class _ClippingEngine(PlainEngine):
    """Engine that runs `encode` as the forward pass and clips the gradients before each step."""

    def __init__(self, model: nn.Module, encode: Callable[..., Any], optimizer: Any, clip: float) -> None:
        super().__init__(model, optimizer)
        self._encode, self._clip = encode, clip

    def __call__(self, image: Tensor, text: Tensor, text_ready: Any = None) -> tuple[Tensor, Tensor]:
        features: tuple[Tensor, Tensor] = self._encode(image, text)
        if text_ready is not None:
            text_ready(features[1])
        return features

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
        super().step()


def replay(
    ranks: list[list[Call]],
    data: list[tuple[Tensor, Tensor]],
    method: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    encode: Callable[..., Any] | None = None,
    clip: float = float("inf"),
) -> Trained:
    """Train on one rank with the project's `TrainStep`, using the global batches of the recorded calls.

    Args:
        ranks: the recorded calls on each rank.
        encode: a function from (images, texts) to their features; by default, the model.
    """
    tree = {"objective": {"method": method, **OPTIONS[method]}, "optimizer": {"betas": (0.9, 0.98), "eps": 1e-6}}
    context = Context(DIM, len(data), Communicator(), torch.float64)
    objective = build_objective(Config.model_validate(tree), context, torch.float64)
    engine = Engine(_ClippingEngine(model, encode or model, optimizer, clip), Communicator())
    images, texts = (torch.stack(column) for column in zip(*data, strict=True))
    total, peak = len(ranks[0]), optimizer.param_groups[0]["lr"]
    for number, calls in enumerate(zip(*ranks, strict=True)):
        index = torch.cat([call.index for call in calls])
        step = TrainStep(engine, objective, Communicator(), len(index))
        place = Step(number, number // (total // EPOCHS), calls[0].lr, peak, number / total)
        step(Batch(images[index], texts[index], index, torch.ones(len(index), dtype=torch.bool)), place)
    return Trained.of(model, float(objective.replicated_state()["temperature.theta"].neg().exp()), ranks[0])


def replay_encoders(ranks: list[list[Call]], method: str) -> Trained:
    """Train `Encoders` on the pairs that the page's loops receive."""
    model = Encoders()
    return replay(ranks, pairs(), method, model, torch.optim.AdamW(model.parameters(), LR))


def check_loop(train: Callable[..., Trained], method: str, ranks: int, folder: Path, resume: dict[str, str]) -> None:
    """Check that a page's loop matches the trainer, both in full and when the changes in `resume` start it midway."""
    steps = 12 // ranks
    known: list[list[Call]] = [[] for _ in range(ranks)]
    for changes in ({}, resume):
        found = run_ranks(ranks, train, method, folder, changes)
        calls = [[*before, *rank.calls] for before, rank in zip(known, found, strict=True)]
        assert len({call.lr for call in calls[0]}) == len(calls[0]) == steps
        wanted = replay_encoders(calls, method)
        for rank in found:
            assert_equal(rank, wanted)
        known = [of_rank[: steps // 2] for of_rank in calls]


def assert_equal(found: Trained, wanted: Trained) -> None:
    """Compare up to rounding: ranks sum in a different order (measured effect: 3e-14 on weights, 1e-14 on gradients).

    Adam divides gradients that are zero except for rounding, such as those of the keys' biases, by its small eps. The
    NPN's updates also magnify rounding errors: with NeuCLIP's full gradient, to as much as 1.2e-11 of a weight.
    """
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-9, atol=1e-10)
    if found.gradients:
        torch.testing.assert_close(found.gradients, wanted.gradients, rtol=1e-9, atol=1e-10)
    assert abs(found.temperature / wanted.temperature - 1) < 1e-9
