"""A run whose steps stay not finite returns to its newest checkpoint once, and ends if it fails there again."""

from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from safetensors.torch import load_file
from small_runs import SMALL, newest_checkpoint, read_options, records, train_connected
from test_non_finite import differing, state_of

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import TrainingDiverged
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.loop import Loop, StepResult

OPTIONS = [
    "--data.batch_size=8",
    "--run.checkpoint_every=3",
    "--run.max_skipped_steps=2",
    "--run.log_every=1",
    "--objective.method=neuclip",
    "--objective.npn.prototypes=8",
]


class BreakWeight(Hook):
    """Makes a weight infinite on rank 1 after a step, once or each time."""

    def __init__(self, rank: int, step: int, times: int) -> None:
        self._rank, self._step, self._left = rank, step, times
        self.steps: list[int] = []
        self.states: list[dict[str, torch.Tensor]] = []  # at starts and before checkpoints

    def start(self, loop: Loop) -> None:
        assert not active_children()  # the loader's of the steps before
        self.states.append(self.snapshot(loop))

    def after_step(self, loop: Loop, result: StepResult) -> None:
        self.steps.append(result.step)
        if result.step == self._step and self._left:
            self._left -= 1
            if self._rank == 1:
                next(p for p in loop.context.engine.module.parameters() if p.ndim > 1).data.view(-1)[0] = torch.inf
        if result.saves:
            self.states.append(self.snapshot(loop))

    def snapshot(self, loop: Loop) -> dict[str, torch.Tensor]:
        return state_of(loop.context.engine, loop.objective, self._rank)


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


def test_a_passing_fault_costs_the_steps_since_the_checkpoint_and_nothing_else(shards: Path, tmp_path: Path) -> None:
    results = run_ranks(2, run, shards, tmp_path / "broken", 1)
    run_ranks(2, run, shards, tmp_path / "whole", 0)
    for steps, (_, saved, restored, *_), message in results:
        assert not message
        assert steps == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7]  # this hook comes before the one that rolls back
        assert differing(saved, restored) == []
    (event,) = records(tmp_path / "broken" / "run" / "events.jsonl")
    assert (event["step"], event["kind"]) == (3, "rolled_back")
    assert len(event["indices"]) == 2 * 4  # rank 1's of both steps
    assert event["message"].startswith("steps 5 to 6 were skipped: in the last, the features of samples [")
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


def test_a_lasting_fault_ends_the_run_on_both_ranks(shards: Path, tmp_path: Path) -> None:
    for steps, (_, saved, restored), message in run_ranks(2, run, shards, tmp_path, 2):
        assert steps == [1, 2, 3, 4, 5, 6, 4, 5, 6]
        assert differing(saved, restored) == []
        assert "as before the return to step_000000003: lower optimizer.lr" in message
    kinds = [event["kind"] for event in records(tmp_path / "run" / "events.jsonl")]
    assert kinds == ["rolled_back", "step_skipped", "step_skipped", "diverged"]
    assert newest_checkpoint(tmp_path).name == "step_000000003"
