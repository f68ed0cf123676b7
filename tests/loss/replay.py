"""Run the code of a page, and train by the project's own `TrainStep` on the batches that its loss was given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reference import PlainEngine
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.modules.module import register_module_forward_pre_hook

from neuclip_ds.config import Config
from neuclip_ds.data.loader import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.loss import ContrastiveLoss
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.training.step import TrainStep

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
DIM, SAMPLES, LR, EPOCHS = 6, 48, 1e-3, 2
# 7 prototypes: the NPN predicts from the second step on. A warm accumulator: from zero, AdaGrad's first step is a sign.
OPTIONS: dict[str, dict[str, Any]] = {
    "neuclip": {"npn": {"prototypes": 7, "updates": 3, "lr": 0.1, "initial_accumulator": 0.1}},
    "fastclip_v3": {"temperature": {"rho": 2.0}},
}


# variables of launchers that tests/ranks.py leaves out, as the process group is there already
RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class Call(NamedTuple):
    index: Tensor
    lr: float


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    temperature: float
    calls: list[Call]  # of the loss in training, on this rank

    @classmethod
    def of(cls, model: nn.Module, loss_fn: ContrastiveLoss, calls: list[Call]) -> Trained:
        weights = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
        return cls(weights, loss_fn.temperature, calls)


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


def run_page(page: str, method: str, names: dict[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    """Run a page's code with another method and return its names; `changes` replace text that it must contain."""
    (code,) = code_blocks(page)
    for before, after in {'"neuclip", ': f'"{method}", **options, ', **changes}.items():
        assert before in code
        code = code.replace(before, after)
    names = {**names, "options": OPTIONS[method]}
    exec(compile(code, page, "exec"), names)
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
    """Record the index and the learning rate of every call of a loss in training."""
    calls: list[Call] = []

    def record(module: nn.Module, args: Any) -> None:
        if isinstance(module, ContrastiveLoss) and module.training and torch.is_grad_enabled():
            calls.append(Call(args[2].clone(), module.lr))

    handle = register_module_forward_pre_hook(record)
    try:
        yield calls
    finally:
        handle.remove()


class _ClippingEngine(PlainEngine):
    """Runs `encode` for a forward pass, and clips the gradient before each step."""

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
    """Train on one rank by the project's `TrainStep`, on the global batches of recorded calls.

    Args:
        ranks: the calls of each rank.
        encode: (images, texts) -> features, where it is not the model.
    """
    tree = {"objective": {"method": method, **OPTIONS[method]}, "optimizer": {"betas": (0.9, 0.98), "eps": 1e-6}}
    context = Context(DIM, SAMPLES, Communicator(), torch.float64)
    objective = build_objective(Config.model_validate(tree), context, torch.float64)
    engine = _ClippingEngine(model, encode or model, optimizer, clip)
    images, texts = (torch.stack(column) for column in zip(*data, strict=True))
    total = len(ranks[0])
    for number, calls in enumerate(zip(*ranks, strict=True)):
        index = torch.cat([call.index for call in calls])
        step = TrainStep(engine, objective, Communicator(), len(index), seed=0)
        place = Step(number, number // (total // EPOCHS), calls[0].lr, LR, number / total)
        step(Batch(images[index], texts[index], index, torch.ones(len(index), dtype=torch.bool)), place)
    weights = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    return Trained(weights, float(objective.replicated_state()["temperature.theta"].neg().exp()), ranks[0])


def assert_equal(found: Trained, wanted: Trained) -> None:
    """Compare in float64: ranks sum in another order, which moves the last bits only."""
    assert found.weights.keys() == wanted.weights.keys()
    for name, value in wanted.weights.items():
        assert torch.allclose(found.weights[name], value, rtol=1e-9, atol=1e-12), name
    assert abs(found.temperature / wanted.temperature - 1) < 1e-9
