"""User hooks run around every training step in order, and can stop a run, which then saves a checkpoint."""

from pathlib import Path

import pytest
from small_runs import SMALL

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.trainer import Loop, StepResult, train


class Recording(Hook):
    """Hook that records its calls and the losses, and requests a stop after step `stop_after`."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []
        self._stop_after = stop_after

    def start(self, loop: Loop) -> None:
        self.calls.append(f"start {loop.done}/{loop.total}")

    def before_step(self, loop: Loop) -> None:
        self.calls.append("before")

    def on_batch(self, loop: Loop, batch: Batch) -> None:
        self.calls.append(f"batch of {len(batch.index)}")

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self.calls.append(f"after {result.step}")
        self.losses.append(result.metrics["loss"])
        loop.stop_requested = result.step == self._stop_after

    def finish(self, loop: Loop) -> None:
        self.calls.append("finish")

    def close(self, loop: Loop, error: BaseException | None) -> None:
        self.calls.append(f"close {type(error).__name__}")


def run(shards: Path, runs: Path, *hooks: Hook) -> None:
    options = ["--data.batch_size=8", "--data.workers=0", "--data.val=", "--data.zero_shot=", "--max_steps=3"]
    where = [f"--data.train={shards}", f"--run.output_dir={runs}", "--run.name=run"]
    train(parse(["demo", *SMALL, *options, *where]).config, RankEnvironment(0, 0, 1), hooks)


STEP = ["before", "batch of 8"]


def test_hooks_see_every_step_in_order_and_stop_a_run_with_a_checkpoint(shards: Path, tmp_path: Path) -> None:
    hook = Recording(stop_after=2)
    run(shards, tmp_path, hook)
    assert hook.calls == ["start 0/3", *STEP, "after 1", *STEP, "after 2", "close NoneType"]
    assert len(set(hook.losses)) == 2
    assert [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000000002"]
    hook = Recording()
    run(shards, tmp_path, hook)
    assert hook.calls == ["start 2/3", *STEP, "after 3", "finish", "close NoneType"]


def test_an_error_closes_the_hooks(shards: Path, tmp_path: Path) -> None:
    class Failing(Hook):
        def on_batch(self, loop: Loop, batch: Batch) -> None:
            raise RuntimeError("of the user")

    hook = Recording()
    with pytest.raises(RuntimeError, match="of the user"):
        run(shards, tmp_path, hook, Failing())
    assert hook.calls == ["start 0/3", *STEP, "close RuntimeError"]
