"""Compare the lean ZeRO 1 step with DeepSpeed's: equal state bit for bit, fewer launches, fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import Layers, gathered_weights, save_engine, small_engine
from test_step import TOKENS, Trainee, config_of, data, new_loss, position_of
from torch import Tensor, nn

from neuclip_ds.checkpoint.engine_state import load_engine
from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine import lean_zero1
from neuclip_ds.engine.average import WeightAverage
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.build import build_dual_encoder

SMALL_BUCKET = 3_000  # elements: fewer than the matrices have together, and more than the vectors
ROWS = 12  # divisible by two ranks and three micro-batches
STEPS = 5
NOT_FINITE = 2  # step whose gradient is infinite on the last rank
NO_CLIPPING = 0.0
CLIPPING = 0.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of a few steps."""

    optimizer: str
    micro_batches: int
    max_grad_norm: float
    trains_images: bool = True


CASES = [
    Case(optimizer="adamw", micro_batches=1, max_grad_norm=NO_CLIPPING),
    Case(optimizer="lamb", micro_batches=3, max_grad_norm=NO_CLIPPING, trains_images=False),
]
CLIPPED = Case(optimizer="adamw", micro_batches=3, max_grad_norm=CLIPPING)


class SmallRun:
    """A small model under ZeRO 1 in bf16, with a moving average of its weights."""

    def __init__(self, communicator: Communicator, case: Case, lean: bool) -> None:
        optimizer = {"name": case.optimizer, "max_grad_norm": case.max_grad_norm, "lean_zero1": lean}
        options: dict[str, Any] = {
            "data": {"batch_size": ROWS},
            "optimizer": optimizer,
            "model": {"vision": {"options": {"depth": 1}}},
        }
        config: Config = config_of("openclip", "zero1_bf16", **options)
        torch.manual_seed(0)
        self.model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
        self.model.vision.requires_grad_(case.trains_images)
        engine_config = load_engine_config(config, communicator.world_size)
        self.engine: Engine = start_engine(self.model, config.optimizer, engine_config, communicator)
        self._communicator = communicator
        self._rows = ROWS // communicator.world_size
        self.trainee = Trainee(self.engine, new_loss(config, communicator), self._rows // case.micro_batches)
        self._average = WeightAverage(self.engine, 0.9)
        self.norms: list[float] = []

    def step(self, number: int, is_finite: bool = True) -> bool:
        """Take a step, and return whether it was applied."""
        whole = data(number)
        mine = slice(self._communicator.rank * self._rows, (self._communicator.rank + 1) * self._rows)
        batch = Batch(whole.image[mine], whole.tokens[mine], whole.index[mine], whole.valid[mine])
        is_last = self._communicator.rank == self._communicator.world_size - 1
        with infinite_gradient(self.model, not is_finite and is_last):
            outcome = self.trainee.step(batch, position_of(number))
        if outcome.applied:
            self._average.update(number + 1)
            self.norms.append(outcome.grad_norm)
        return outcome.applied

    def state(self) -> dict[str, Tensor]:
        """Return copies of the weights, master weights, moments and moving average."""
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        for placement in self.engine.placements():
            tensors[f"{placement.name} master"] = placement.master
            for kind, value in self.engine.optimizer_state.get(placement.master, {}).items():
                tensors[f"{placement.name} {kind}"] = value
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def infinite_gradient(model: torch.nn.Module, is_infinite: bool) -> Iterator[None]:
    weight = next(weight for weight in model.parameters() if weight.requires_grad and weight.ndim > 1)
    factor = torch.inf if is_infinite else 1.0
    hook = weight.register_hook(lambda gradient: gradient * factor)
    yield
    hook.remove()


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def compare(communicator: Communicator, cases: list[Case]) -> list[dict[str, Any]]:
    """Take the same steps in both ways, one of them with an infinite gradient on the last rank."""
    lean_zero1.BUCKET_ELEMENTS = SMALL_BUCKET
    found = []
    for case in cases:
        runs = [SmallRun(communicator, case, lean) for lean in (False, True)]
        changed_by_skip = []
        for number in range(STEPS):
            is_finite = number != NOT_FINITE
            before = runs[1].state()
            applied = [run.step(number, is_finite) for run in runs]
            assert applied == [is_finite, is_finite]
            if not is_finite:
                changed_by_skip = differing(runs[1].state(), before)
        states = [run.state() for run in runs]
        found.append(
            {
                "differing": differing(*states),
                "changed_by_skip": changed_by_skip,
                "skipped": [run.engine.skipped_steps for run in runs],
                "norms": [run.norms for run in runs],
                "moments": sum("exp_avg" in name for name in states[0]),
            }
        )
    return found


@pytest.mark.parametrize(("ranks", "cases"), [(1, [CLIPPED]), (2, CASES)])
def test_the_state_equals_deepspeeds_bit_for_bit(ranks: int, cases: list[Case]) -> None:
    """On one rank, the norm and thus the clipping are equal too."""
    for results in run_ranks(ranks, compare, cases):
        for case, found in zip(cases, results, strict=True):
            assert found["differing"] == [], case
            assert found["changed_by_skip"] == [], case
            assert found["skipped"] == [1, 1]
            assert found["moments"]
            deepspeeds, ours = found["norms"]
            assert ours == pytest.approx(deepspeeds, rel=1e-6)
            if case.max_grad_norm:
                assert max(ours) > case.max_grad_norm, "nothing is clipped"


def exchange(communicator: Communicator, folder: Path) -> list[str]:
    """Save after two steps in both ways, and resume each checkpoint in the other way; return what differs."""
    resumed = []
    changed_by_resume = []
    for lean in (False, True):
        first = SmallRun(communicator, CASES[0], lean)
        for number in range(2):
            first.step(number)
        save_engine(folder / str(lean), first.engine, communicator)
        second = SmallRun(communicator, CASES[0], not lean)
        load_engine(folder / str(lean), second.engine, communicator)
        changed_by_resume += differing(second.state(), first.state())
        second.trainee.loss = first.trainee.loss  # with the temperature
        for number in range(2, 4):
            second.step(number)
        resumed.append(second.state())
    return changed_by_resume + differing(*resumed)


def test_a_checkpoint_resumes_in_the_other_way(tmp_path: Path) -> None:
    assert run_ranks(2, exchange, tmp_path) == [[], []]


class Branches(Layers):
    """Layers of which each rank uses a different one in each step."""

    used = 0

    def forward(self, rows: Tensor, *options: Any) -> Tensor:
        first: nn.Module = self[0]
        branch: nn.Module = self[1 + self.used]
        output: Tensor = branch(first(rows))
        return output


def use_different_parameters(communicator: Communicator) -> list[dict[str, Tensor]]:
    """Train without gradients of some parameters on each rank: with DeepSpeed's step, then twice with the lean step."""
    lean_zero1.BUCKET_ELEMENTS = 20
    weights = []
    for lean in (False, True, True):
        torch.manual_seed(0)
        net = Branches(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 5))
        engine = small_engine(net, OptimizerConfig(lr=0.1, lean_zero1=lean), "zero1_bf16", 6, communicator)
        for step in range(3):
            net.used = (step + communicator.rank) % 3
            rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
            engine.backward(engine(rows, None).float().square().mean())  # type: ignore[arg-type, union-attr]
            assert engine.step(0.1).applied
        weights.append(gathered_weights(net))
    return weights


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_use_different_parameters_reduce_in_the_same_order(ranks: int) -> None:
    """On three ranks, sums may be rounded differently, which may change the last bit of a weight."""
    for deepspeeds, lean, again in run_ranks(ranks, use_different_parameters):
        assert differing(lean, again) == []
        assert ranks > 2 or differing(lean, deepspeeds) == []
        for name, weight in deepspeeds.items():
            torch.testing.assert_close(lean[name], weight, rtol=2**-7, atol=1e-3)
