"""Run a page's code, and train with the project's `train_step` on the batches that the page's loss received."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import PlainDeepSpeed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.engine import Engine
from neuclip_ds.losses import ContrastiveLoss, Position
from neuclip_ds.training.step import train_step

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
    pytest.param("fastclip_v3", 2, marks=pytest.mark.slow),
    pytest.param("neuclip", 1, marks=pytest.mark.slow),
]
# launcher variables; their values are unused because the process group already exists
RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call to the loss in training mode."""

    index: Tensor
    lr: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The final state of a training loop on one rank, and its calls to the loss."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # from the last step, if the loop keeps them
    temperature: float
    calls: list[Call]  # this rank's calls to the loss in training mode

    @classmethod
    def of(cls, model: nn.Module, temperature: float, calls: list[Call]) -> Trained:
        weights: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            weights[name] = full_tensor(weight.detach()).clone()
            if weight.grad is not None:
                gradients[name] = full_tensor(weight.grad).clone()
        return cls(weights=weights, gradients=gradients, temperature=temperature, calls=calls)


def full_tensor(value: Tensor) -> Tensor:
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
    """Two small towers in float64; the text tower runs first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, DIM))
        self.text = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, DIM))
        self.double()

    def forward(
        self, image: Tensor, text: Tensor, send_text: Callable[[Tensor], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        text_features = normalize(self.text(text), dim=1)
        if send_text is not None:
            send_text(text_features)
        return normalize(self.image(image), dim=1), text_features


def pairs(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images, noise = torch.randn(2, SAMPLES, 8, generator=generator, dtype=torch.float64)
    return list(zip(images, images + noise, strict=True))


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the index and the learning rate of each step of a loss in training mode."""
    calls: list[Call] = []
    begin = ContrastiveLoss.begin
    forward = ContrastiveLoss.forward

    def record(loss_fn: ContrastiveLoss, index: Tensor | None) -> None:
        if loss_fn.training and torch.is_grad_enabled():
            assert index is not None
            calls.append(Call(index=index.clone(), lr=loss_fn.lr))

    def recorded_begin(loss_fn: ContrastiveLoss, index: Tensor, *arguments: Any, **keywords: Any) -> Any:
        record(loss_fn, index)
        return begin(loss_fn, index, *arguments, **keywords)

    def recorded_forward(
        loss_fn: ContrastiveLoss,
        image: Tensor,
        text: Tensor,
        index: Tensor | None = None,
        *arguments: Any,
        **keywords: Any,
    ) -> Tensor:
        if "pending" not in keywords:
            record(loss_fn, index)
        return forward(loss_fn, image, text, index, *arguments, **keywords)

    with patch.multiple(ContrastiveLoss, begin=recorded_begin, forward=recorded_forward):
        yield calls


class _ClippingEngine(PlainDeepSpeed):
    """Engine that runs `encode` as the forward pass and clips the gradients before each step."""

    def __init__(self, model: nn.Module, encode: Callable[..., Any], optimizer: Any, clip: float) -> None:
        super().__init__(model, optimizer)
        self._encode = encode
        self._clip = clip

    def __call__(
        self, image: Tensor, text: Tensor, text_ready: Callable[[Tensor], None], image_first: bool
    ) -> tuple[Tensor, Tensor]:
        features: tuple[Tensor, Tensor] = self._encode(image, text)
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
    """Train on one rank with the project's `train_step`, using the global batches of the recorded calls.

    Args:
        ranks: the recorded calls on each rank.
        data: the samples that the indices refer to.
        encode: a function from (images, texts) to their features; by default, the model.
        clip: largest norm of the weights' gradient.
    """
    total = len(ranks[0])
    peak_lr = optimizer.param_groups[0]["lr"]
    communicator = Communicator()
    engine = Engine(_ClippingEngine(model, encode or model, optimizer, clip), communicator)
    loss_fn = ContrastiveLoss(
        method,
        dim=DIM,
        samples=len(data),
        epochs=EPOCHS,
        steps_per_epoch=total // EPOCHS,
        lr=peak_lr,
        communicator=communicator,
        undo=True,
        validate=False,
        dtype=torch.float64,
        spare_row=False,
        **OPTIONS[method],
    )
    images = torch.stack([image for image, _ in data])
    texts = torch.stack([text for _, text in data])
    for step, calls in enumerate(zip(*ranks, strict=True)):
        index = torch.cat([call.index for call in calls])
        valid = torch.ones(len(index), dtype=torch.bool)
        batches = DeviceBatches(torch.device("cpu"), micro_batch=len(index))
        batches.start(iter([RankBatch([Batch(image=images[index], tokens=texts[index], index=index, valid=valid)])]))
        position = Position(
            step=step, epoch=step // (total // EPOCHS), progress=step / total, lr=calls[0].lr, peak_lr=peak_lr
        )
        outcome = train_step(engine, loss_fn, batches, next(batches), position)
        assert outcome.applied
    return Trained.of(model, loss_fn.temperature, ranks[0])


def replay_encoders(ranks: list[list[Call]], method: str) -> Trained:
    """Train `Encoders` on the pairs that the page's loops receive."""
    model = Encoders()
    return replay(ranks, pairs(), method, model, torch.optim.AdamW(model.parameters(), LR))


def check_loop(train: Callable[..., Trained], method: str, ranks: int, folder: Path, resume: dict[str, str]) -> None:
    """Check that a page's loop matches the trainer, both in full and when the changes in `resume` start it midway."""
    steps = 12 // ranks
    results = run_ranks(ranks, _train_and_resume, train, method, folder, resume)
    full_runs = [full for full, _ in results]
    check_replay(full_runs, method, [run.calls for run in full_runs], steps)
    resumed_runs = [resumed for _, resumed in results]
    calls: list[list[Call]] = []
    for full, resumed in results:
        calls.append([*full.calls[: steps // 2], *resumed.calls])
    check_replay(resumed_runs, method, calls, steps)


def _train_and_resume(
    communicator: Communicator, train: Callable[..., Trained], method: str, folder: Path, resume: dict[str, str]
) -> tuple[Trained, Trained]:
    full = train(communicator, method, folder, {})
    return full, train(communicator, method, folder, resume)


def check_replay(results: list[Trained], method: str, calls: list[list[Call]], steps: int) -> None:
    """Check that all ranks' results equal those of the trainer after the given calls, whose learning rates differ."""
    assert len({call.lr for call in calls[0]}) == len(calls[0]) == steps
    expected = replay_encoders(calls, method)
    for result in results:
        assert_equal(result, expected)


def assert_equal(result: Trained, expected: Trained, name: str = "") -> None:
    """Compare up to rounding: ranks sum in a different order (measured effect: 3e-14 on weights, 1e-14 on gradients).

    The NPN's updates magnify rounding errors: with NeuCLIP's full gradient, to as much as 1.2e-11 of a weight. A model
    with weights whose gradient is zero except for rounding, such as the biases of attention keys, must be trained with
    an Adam epsilon far above the rounding errors: a small epsilon makes Adam magnify them.
    """

    def named(message: str) -> str:
        return f"{name}: {message}"

    torch.testing.assert_close(result.weights, expected.weights, rtol=1e-9, atol=1e-10, msg=named)
    if result.gradients:
        torch.testing.assert_close(result.gradients, expected.gradients, rtol=1e-9, atol=1e-10, msg=named)
    assert abs(result.temperature / expected.temperature - 1) < 1e-9, name
