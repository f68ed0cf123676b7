"""Steps with non-finite features, losses or gradients are skipped on all ranks and do not change any state.

A run whose steps stay non-finite rolls back to its newest checkpoint once, and ends if they are non-finite again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from small_runs import SMALL, newest_checkpoint, read_options, records, train_connected
from test_step import ROWS, TOKENS, Trainee, config_of, data, new_loss, position_of, rank_part

from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.losses.base import LossFunction
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.step import StepOutcome
from neuclip_ds.training.trainer import Loop, StepResult

FAULTY, STEPS = 3, 5
Fault = Callable[[Any, Batch], Any]


def on_last_rank(batch: Batch) -> bool:
    return int(batch.index[-1]) == FAULTY + ROWS - 1  # the first index in a global batch is the number of the batch


@contextmanager
def activation(model: Any, batch: Batch) -> Iterator[None]:
    """Make the activations of the third image of each micro-batch infinite on the last rank."""

    def overflow(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(0, torch.tensor([2]), torch.inf)

    hook = model.vision.register_forward_hook(overflow) if on_last_rank(batch) else None
    yield
    if hook is not None:
        hook.remove()


@contextmanager
def weight(model: Any, batch: Batch) -> Iterator[None]:
    """Make one weight infinite on the last rank during the step."""
    broken = next(p for p in model.parameters() if p.ndim > 1)
    before = broken.detach().clone()
    if on_last_rank(batch):
        broken.data.view(-1)[0] = torch.inf
    yield
    broken.data.copy_(before)


@contextmanager
def gradient(model: Any, batch: Batch) -> Iterator[None]:
    """Make the gradient of one parameter overflow on the last rank, while the loss and features are finite."""
    factor = torch.inf if on_last_rank(batch) else 1.0
    hook = next(p for p in model.parameters() if p.ndim > 1).register_hook(lambda grad: grad * factor)
    yield
    hook.remove()


def state_of(engine: Engine, loss: LossFunction) -> dict[str, torch.Tensor]:
    """Return copies of a rank's state: weights, master weights, optimizer moments, and the loss's state."""
    tensors = {name: getattr(p, "ds_tensor", p) for name, p in engine.module.named_parameters()}
    for placement in engine.placements():
        tensors[f"{placement.name} master"] = placement.master
        for key, value in engine.optimizer_state.get(placement.master, {}).items():
            tensors[f"{placement.name} {key}"] = value
    tensors |= loss.replicated_state()
    for name, table in loss.row_tables().items():
        tensors |= {name + key: value for key, value in table.tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name, value in found.items() if not torch.equal(value, wanted[name])]


class Run:
    """A model, its engine and a loss that run a few training steps."""

    def __init__(self, communicator: Communicator, method: str, engine: str, micro: int) -> None:
        config = config_of(method, engine, model={"vision": {"options": {"depth": 1}}})
        torch.manual_seed(0)
        self.model = build_dual_encoder(config.model, TOKENS)  # type: ignore[arg-type]
        engine_config = load_engine_config(config, communicator.world_size)
        self.engine = start_engine(self.model, config.optimizer, engine_config, communicator)
        self._trainee = Trainee(self.engine, new_loss(config, communicator), micro)
        self._communicator = communicator

    def step(self, number: int, fault: Fault | None = None) -> StepOutcome:
        batch = rank_part(data(number), self._communicator)
        if fault is None:
            return self._trainee.step(batch, position_of(number))
        with fault(self.model, batch):
            return self._trainee.step(batch, position_of(number))

    def state(self) -> dict[str, torch.Tensor]:
        return state_of(self.engine, self._trainee.loss.function)


def skip_one(communicator: Communicator, cases: list[tuple[str, str, int, Fault]]) -> list[Any]:
    """Run cases with and without a faulty step; return whether it applied, changes, differences and bad samples."""
    results = []
    for method, engine, micro, fault in cases:
        run, other = (Run(communicator, method, engine, micro) for _ in range(2))
        for number in range(FAULTY):
            assert run.step(number).applied
            other.step(number)
        before = run.state()
        outcome = run.step(FAULTY, fault)
        changed = differing(run.state(), before)
        for number in range(FAULTY + 1, STEPS):
            assert run.step(number).applied
            other.step(number)
        assert run.engine.skipped_steps == 1
        results.append((outcome.applied, changed, differing(run.state(), other.state()), outcome.not_finite))
    return results


def check(cases: list[tuple[str, str, int, Fault]], ranks: int = 2, device: str = "cpu") -> None:
    of_rank_one = range(FAULTY + ROWS // 2, FAULTY + ROWS)
    for rank in run_ranks(ranks, skip_one, cases, device=device):
        for (*case, micro, fault), found in zip(cases, rank, strict=True):
            samples = {activation: of_rank_one[2::micro], weight: of_rank_one, gradient: []}[fault]
            assert found == (False, [], [], list(samples)), (case, micro, fault)


def test_a_fault_of_one_rank_skips_the_step_on_both_and_leaves_no_trace_in_any_kind_of_method() -> None:
    """In float32 without ZeRO, DeepSpeed itself would apply the step."""
    check(
        [
            ("neuclip", "zero0_fp32", 8, activation),
            ("fastclip_v3", "zero0_fp32", 4, gradient),
            ("amorlip", "zero1_bf16", 4, weight),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", [activation, gradient])
def test_every_method_skips_alike(fault: Fault) -> None:
    check([(method, "zero0_fp32", 8, fault) for method in METHODS])


@pytest.mark.slow
def test_every_stage_and_precision_skips_alike() -> None:
    engines = [f"zero{stage}_{precision}" for stage in range(4) for precision in ("fp32", "bf16")]
    engines += ["zero2_bf16_offload", "zero3_bf16_offload"]
    check([("neuclip", engine, 4, fault) for engine in engines for fault in (activation, gradient)])


OPTIONS = [
    "--data.batch_size=8",
    "--run.checkpoint_every=3",
    "--run.max_skipped_steps=2",
    "--run.log_every=1",
    "--objective.method=neuclip",
    "--objective.npn.prototypes=8",
]


class BreakWeight(Hook):
    """Hook that makes a weight infinite on rank 1 after a step, at most `times` times if the step is repeated."""

    def __init__(self, rank: int, step: int, times: int) -> None:
        self._rank, self._step, self._left = rank, step, times
        self.steps: list[int] = []
        self.states: list[dict[str, torch.Tensor]] = []  # after each launch or rollback, and before each checkpoint

    def start(self, loop: Loop) -> None:
        assert not active_children()  # the loader processes of earlier steps have ended
        assert (loop.metrics is None) == (self._rank > 0)
        self.states.append(self.snapshot(loop))

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self.steps.append(result.step)
        if result.step == self._step and self._left:
            self._left -= 1
            if self._rank == 1:
                next(p for p in loop.context.engine.module.parameters() if p.ndim > 1).data.view(-1)[0] = torch.inf

    def state(self, loop: Loop) -> dict[str, Any]:
        self.states.append(self.snapshot(loop))
        return {}

    def snapshot(self, loop: Loop) -> dict[str, torch.Tensor]:
        return state_of(loop.context.engine, loop.loss.function)


def run(communicator: Communicator, shards: Path, runs: Path, times: int) -> Any:
    where = [f"--data.train={shards}", f"--run.output_dir={runs}", "--run.name=run", "--deepspeed=zero0_fp32"]
    options = ["demo", *SMALL, *OPTIONS, "--data.val=", "--data.zero_shot=", "--data.workers=1", "--max_steps=7"]
    config = parse(read_options([*options, *where])).config
    hook, message = BreakWeight(communicator.rank, 4, times), ""
    try:
        train_connected(communicator, config, hook)
    except TrainingDiverged as error:
        message = str(error)
    return hook.steps, hook.states, message


def runs_of(communicator: Communicator, shards: Path, times: dict[Path, int]) -> list[Any]:
    return [run(communicator, shards, runs, number) for runs, number in times.items()]


def test_a_passing_fault_costs_the_steps_since_the_checkpoint_and_a_lasting_one_ends_the_run(
    shards: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, runs_of, shards, {tmp_path / "broken": 1, tmp_path / "whole": 0, tmp_path / "lasting": 2})
    for (steps, (_, saved, restored, *_), message), _, _ in results:
        assert not message
        assert steps == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7]  # this hook runs before the hook that rolls back
        assert differing(saved, restored) == []
    (event,) = records(tmp_path / "broken" / "run" / "events.jsonl")
    assert (event["step"], event["kind"]) == (3, "rolled_back")
    assert len(event["indices"]) == 2 * 4  # the samples of rank 1 in both steps
    assert event["message"].startswith("steps 5 to 6 were skipped: in the last step, the features of samples [")
    broken, whole = (newest_checkpoint(tmp_path / name) for name in ("broken", "whole"))
    assert broken.name == "step_000000007"
    for path in whole.rglob("*.safetensors"):
        changed = differing(load_file(broken / path.relative_to(whole)), load_file(path))
        assert [key for key in changed if not key.startswith("buffer/")] == [], path
    losses = [
        [(line["step"], line["loss"]) for line in records(tmp_path / name / "run" / "metrics.jsonl") if "loss" in line]
        for name in ("broken", "whole")
    ]
    assert losses[0] == losses[1]
    for _, _, (steps, (_, saved, restored), message) in results:
        assert steps == [1, 2, 3, 4, 5, 6, 4, 5, 6]
        assert differing(saved, restored) == []
        assert "which also happened before the last rollback: lower optimizer.lr" in message
    kinds = [event["kind"] for event in records(tmp_path / "lasting" / "run" / "events.jsonl")]
    assert kinds == ["rolled_back", "step_skipped", "step_skipped", "diverged"]
    assert newest_checkpoint(tmp_path / "lasting").name == "step_000000003"
