"""A run with a moving average of its weights resumes exactly; both sets of weights are evaluated and can be opened."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small_runs import TINY, newest_checkpoint, records, train_connected

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.checkpoint.sharded_state import WEIGHT, StateFiles
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.average import AVERAGE
from neuclip_ds.recipe import parse

# without a schedule, which would depend on the number of steps
EMA = ["--deepspeed=zero1_fp32", "--ema.decay=0.5", "--optimizer.warmup_steps=0", "--optimizer.schedule=constant"]


def evaluations(runs: Path) -> list[dict[str, float]]:
    lines = records(runs / "run" / "metrics.jsonl")
    return [line for line in lines if "loss" not in line]


def run(communicator: Communicator, shards: Path, runs: Path, ends: list[tuple[str, int]]) -> None:
    """For each pair of a folder and a step, train the run in that folder up to that step."""
    for folder, steps in ends:
        options = [*TINY, *EMA, f"--data.train={shards}", f"--data.val={shards.parent / 'val'}"]
        where = [f"--run.output_dir={runs / folder}", "--run.name=run", f"--max_steps={steps}"]
        train_connected(communicator, parse([*options, *where]).config)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_average_of_an_uninterrupted_run(ranks: int, shards: Path, tmp_path: Path) -> None:
    run_ranks(ranks, run, shards, tmp_path, [("whole", 4), ("broken", 2), ("broken", 4)])
    whole, broken = (StateFiles(newest_checkpoint(tmp_path / name) / "state") for name in ("whole", "broken"))
    for name in whole.shapes:
        for kind in (AVERAGE, WEIGHT):
            assert torch.equal(whole.read(name, kind), broken.read(name, kind)), (name, kind)
    scores = evaluations(tmp_path / "whole")[-1]
    assert scores == evaluations(tmp_path / "broken")[-1]
    metric = "image_to_text_recall@1"
    assert {metric, f"ema/{metric}"} < scores.keys()
    checkpoint = str(newest_checkpoint(tmp_path / "whole"))
    trained, averaged = (open_model(checkpoint, Communicator(), ema).model for ema in (False, True))
    name = "vision.projection.weight"
    assert torch.equal(averaged.get_parameter(name).view(-1), whole.read(name, AVERAGE))
    assert not torch.equal(averaged.get_parameter(name), trained.get_parameter(name))
