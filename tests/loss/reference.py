"""What the project's own trainer computes for a small model, and the code of the pages that must equal it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.data.loader import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.training.step import TrainStep

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
# 7 prototypes: the NPN predicts from the second step on. A warm accumulator: from zero, AdaGrad's first step is a sign.
OPTIONS: dict[str, dict[str, Any]] = {
    "neuclip": {"npn": {"prototypes": 7, "updates": 3, "restart_every": 3, "lr": 0.1, "initial_accumulator": 0.1}},
    "fastclip_v3": {"temperature": {"rho": 2.0}},
}


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


def with_method(code: str, method: str) -> str:
    """Return a page's code with another method, and options that a small model needs."""
    given = 'Loss("neuclip", dim=512'
    assert given in code
    return code.replace(given, f"Loss({method!r}, **options, dim=dim")


def in_micro_batches(loop: str, step: str) -> str:
    """Return a loop whose loss and backward pass are replaced by the code of a step."""
    lines = r"^( +)loss = loss_fn\(.*\n +loss\.backward\(\)\n"
    assert re.search(lines, loop, re.MULTILINE)
    return re.sub(lines, lambda found: textwrap.indent(step, found[1]), loop, flags=re.MULTILINE)


class GlobalBatch(NamedTuple):
    epoch: int
    lr: float
    images: Tensor
    texts: Tensor
    index: Tensor


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the last step
    temperature: float


class Encoders(nn.Module):
    """Two small towers in float64, whose normalised features have width 6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(2))
        self.double()

    def forward(self, image: Tensor, text: Tensor, text_ready: Any = None) -> tuple[Tensor, Tensor]:
        features = normalize(self.image(image), dim=1), normalize(self.text(text), dim=1)
        if text_ready is not None:
            text_ready(features[1])
        return features


class PlainEngine:
    """What the trainer calls of DeepSpeed's engine, on one rank and in plain PyTorch."""

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


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[GlobalBatch],
    method: str,
    dim: int,
    samples: int,
    steps: int,
) -> Trained:
    """Train on one rank by the project's `TrainStep`; `steps` is the length of the run, for schedules."""
    tree = {"objective": {"method": method, **OPTIONS[method]}, "optimizer": {"betas": (0.9, 0.98), "eps": 1e-6}}
    context = Context(dim, samples, Communicator(), torch.float64)
    objective = build_objective(Config.model_validate(tree), context, torch.float64)
    peak = optimizer.param_groups[0]["lr"]
    for number, (epoch, lr, images, texts, index) in enumerate(batches):
        step = TrainStep(PlainEngine(model, optimizer), objective, Communicator(), len(index), seed=0)
        batch = Batch(images, texts, index, torch.ones(len(index), dtype=torch.bool))
        step(batch, Step(number, epoch, lr, peak, number / steps))
    return trained(model, float(objective.replicated_state()["temperature.theta"].neg().exp()))


def trained(model: nn.Module, temperature: float) -> Trained:
    """Return weights and gradients, those of a sharded model in full."""
    weights, gradients = {}, {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            weights[name], gradients[name] = whole(weight.detach()).clone(), whole(weight.grad).clone()
    return Trained(weights, gradients, temperature)


def whole(value: Tensor) -> Tensor:
    """Return a tensor that FSDP2 may have sharded, on all ranks together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal(found: Trained, wanted: Trained) -> None:
    """Compare in float64, as ranks sum in another order: measured, 3e-14 of a weight and 1e-14 of the largest gradient.

    Gradients that are zero but for rounding, such as those of the keys' biases, are divided by Adam's eps, and the
    NPN's updates magnify rounding: with NeuCLIP's full gradient up to 1.2e-11 of a weight.
    """
    for have, want in ((found.weights, wanted.weights), (found.gradients, wanted.gradients)):
        assert want
        torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-10)
    assert abs(found.temperature / wanted.temperature - 1) < 1e-11
