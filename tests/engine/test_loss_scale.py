"""fp16 towers: the loss scale grows and falls, leaves no trace in the weights, and a skipped step changes nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_checkpoints import save_engine, small_engine
from small_runs import TINY, demo_shards, records, train_connected
from torch import Tensor, nn

from neuclip_ds.checkpoint.engine_state import load_engine
from neuclip_ds.checkpoint.sharded_state import WEIGHT
from neuclip_ds.config import OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import FOLDER
from neuclip_ds.engine.update import loss_scale_of, update_weights
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.loop import Loop, StepResult

STAGES = [f"zero{stage}_fp16" for stage in (1, 2, 3)]
ROWS = 4


def allow_fp16() -> None:
    """Let DeepSpeed take float16 on a CPU that computes it by conversion; no test here is about speed."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]


def engine_file(name: str, folder: Path, **options: int) -> str:
    """A file of ds_configs/ with other options of the loss scale."""
    tree = json.loads((FOLDER / f"{name}.json").read_text())
    tree["fp16"] |= options
    path = folder / f"{name}-{'-'.join(map(str, options.values()))}.json"
    path.write_text(json.dumps(tree))
    return str(path)


def build(deepspeed: str, communicator: Communicator, seed: int = 0) -> Any:
    allow_fp16()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False))
    return small_engine(net, OptimizerConfig(lr=0.1), deepspeed, ROWS, communicator)


def step(engine: Any, number: int, factor: float = 1.0) -> bool:
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.1
    rows = torch.randn(2, 3, generator=torch.Generator().manual_seed(number)).half()
    engine.backward((engine(rows).float() + 0.5).square().mean() * factor)
    return update_weights(engine)[1]


def weights(engine: Any, communicator: Communicator, folder: Path) -> dict[str, Tensor]:
    files = save_engine(folder, engine, communicator)
    return {name: files.read(name, WEIGHT) for name in files.shapes}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


def scale_of(engine: Any) -> float:
    scale = loss_scale_of(engine)
    assert scale is not None
    return float(scale.cur_scale)


def follow(communicator: Communicator, folder: Path, name: str) -> None:
    communicator.on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
    steady = build(engine_file(name, folder / "..", initial_scale_power=6), communicator)
    growing_file = engine_file(name, folder / "..", initial_scale_power=6, loss_scale_window=2, hysteresis=1)
    growing = build(growing_file, communicator)
    scales = []
    for number in range(4):
        assert step(steady, number)
        assert step(growing, number)
        scales.append((scale_of(steady), scale_of(growing)))
    assert scales == [(64, 64), (64, 128), (64, 128), (64, 256)]
    before = weights(growing, communicator, folder / "before")
    assert same(weights(steady, communicator, folder / "steady"), before), "powers of two leave no trace"
    assert not step(growing, 4, factor=1e6), "its gradient overflows float16"
    assert scale_of(growing) == 128
    assert same(weights(growing, communicator, folder / "after"), before)
    resumed = build(growing_file, communicator, seed=1)
    load_engine(folder / "after", resumed, communicator)
    for number in range(5, 8):
        assert step(growing, number)
        assert step(resumed, number)
        assert scale_of(growing) == scale_of(resumed)
    assert same(weights(resumed, communicator, folder / "resumed"), weights(growing, communicator, folder / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_the_scale_grows_falls_and_resumes(name: str, tmp_path: Path) -> None:
    run_ranks(2, follow, tmp_path / "run", name)


class Watch(Hook):
    """Compares the state by sample around each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[bool, bool, float]] = []  # applied, whether u has changed, the scale after it

    def _u(self, loop: Loop) -> Tensor:
        return torch.cat([x.flatten() for x in loop.objective.row_tables()["samples"].tensors.values()]).clone()

    def before_step(self, loop: Loop) -> None:
        self._before = self._u(loop)

    def after_step(self, loop: Loop, result: StepResult) -> None:
        moved = not torch.equal(self._before, self._u(loop))
        self.steps.append((result.applied, moved, result.metrics["loss_scale"]))
        assert math.isfinite(result.loss)


def train_from(communicator: Communicator, shards: Path, folder: Path, deepspeed: str) -> list[Any]:
    allow_fp16()
    where = [f"--data.train={shards}", f"--run.output_dir={folder}", "--run.name=run", f"--deepspeed={deepspeed}"]
    options = ["--max_steps=30", "--run.max_skipped_steps=2", "--run.log_every=1"]
    hook = Watch()
    train_connected(communicator, parse([*TINY, *where, *options]).config, hook)
    return hook.steps


def test_a_run_finds_its_scale_without_counting_the_steps_as_failed(tmp_path: Path) -> None:
    """More than `run.max_skipped_steps` steps are skipped from a scale that is far too large; none changes u."""
    shards = demo_shards(tmp_path / "shards", pairs=24)
    deepspeed = engine_file("zero1_fp16", tmp_path, initial_scale_power=40, hysteresis=1)
    for steps in run_ranks(2, train_from, shards, tmp_path, deepspeed):
        skipped = [moved for applied, moved, _ in steps if not applied]
        assert len(skipped) > 2
        assert not any(skipped)
        assert [moved for applied, moved, _ in steps if applied] == [True] * (30 - len(skipped))
        assert steps[-1][2] == 2.0 ** (40 - len(skipped))
    kinds = [event["kind"] for event in records(tmp_path / "run" / "events.jsonl")]
    assert kinds == ["loss_scale"] * len(skipped)
