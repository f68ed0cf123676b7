"""A run with a moving average of its weights: resumed exactly, evaluated and exported by choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_runs import demo_shards, newest_checkpoint, train

from neuclip_ds.checkpoint.saved_model import open_model
from neuclip_ds.checkpoint.sharded_state import WEIGHT, StateFiles
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.average import AVERAGE
from neuclip_ds.errors import UserError

EMA = ["--ema.decay=0.5", "--run.evaluate_every=2", "--optimizer.warmup_steps=0", "--optimizer.schedule=constant"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(demo_shards(tmp_path_factory.mktemp("demo") / "data", 40))


def evaluations(runs: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" not in line]


def test_a_run_that_is_stopped_has_the_same_average(shards: str, tmp_path: Path) -> None:
    held_out = f"--data.val={Path(shards).parent / 'val'}"
    for name, ends in (("whole", [4]), ("broken", [2, 4])):
        for end in ends:
            done = train(tmp_path / name, shards, end, *EMA, held_out)
            assert done.returncode == 0, done.stderr
    whole, broken = (StateFiles(newest_checkpoint(tmp_path / name) / "engine") for name in ("whole", "broken"))
    for name in whole.names():
        for kind in (AVERAGE, WEIGHT):
            assert torch.equal(whole.read(name, kind), broken.read(name, kind)), (name, kind)
    assert evaluations(tmp_path / "whole") == evaluations(tmp_path / "broken")
    scores = evaluations(tmp_path / "whole")[-1]
    metric = "image_to_text_recall@1"
    assert {metric, f"ema/{metric}"} < scores.keys()
    checkpoint = str(newest_checkpoint(tmp_path / "whole"))
    trained, averaged = (open_model(checkpoint, Communicator(), ema).model for ema in (False, True))
    name = "vision.projection.weight"
    assert torch.equal(averaged.get_parameter(name).view(-1), whole.read(name, AVERAGE))
    assert not torch.equal(averaged.get_parameter(name), trained.get_parameter(name))
    plain = train(tmp_path / "whole", shards, 5, *EMA, held_out, "--ema.decay=0")
    assert plain.returncode == 0, plain.stderr
    assert "ema/" not in json.dumps(evaluations(tmp_path / "whole")[-1])
    with pytest.raises(UserError, match="holds no average of the weights"):
        open_model(str(newest_checkpoint(tmp_path / "whole")), Communicator(), True)
