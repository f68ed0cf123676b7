"""A run that fine-tunes a checkpoint keeps its temperature and bias, evaluates it first, and warns of lower scores."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from miniatures import save_clip, save_siglip
from ranks import run_ranks
from small_runs import records, train_connected

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.recipe import validate
from neuclip_ds.reporting.events import EventLog, read_events
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.training.hooks.evaluation import EvaluateModel, evaluates_start, scores_below

I2T, T2I = "image_to_text_recall@1", "text_to_image_recall@1"
CHECKPOINTS = {"clip": save_clip, "siglip": save_siglip}
LOGITS = {"clip": {"tau": math.exp(-4.0)}, "siglip": {"tau": math.exp(-4.75), "bias": -12.5}}
METHODS = [("clip", "openclip"), ("clip", "sogclr"), ("clip", "neuclip_queue"), ("siglip", "siglip")]


def train_without_learning(communicator: Communicator, shards: Path, folder: Path) -> None:
    """Train one step at a learning rate of 0, with the methods' default temperatures."""
    for family, method in METHODS:
        config: dict[str, Any] = {
            "run": {"name": method, "output_dir": str(folder)},
            "data": {"train": str(shards), "val": str(shards.parent / "val"), "zero_shot": "", "batch_size": 8},
            "model": {"pretrained": str(folder / family)},
            "objective": {"method": method},
            "optimizer": {"lr": 0, "warmup_steps": 0},
            "deepspeed": "zero0_fp32",
            "max_steps": 1,
        }
        config["data"]["workers"] = 0
        if family == "siglip":
            config["objective"]["temperature"] = {"minimum": 0.005}
        train_connected(communicator, validate(config))


def test_fine_tuning_starts_at_the_checkpoints_temperature_and_bias(shards: Path, tmp_path: Path) -> None:
    for family, save in CHECKPOINTS.items():
        save(tmp_path / family)
    run_ranks(1, train_without_learning, shards, tmp_path)
    for family, method in METHODS:
        lines = records(tmp_path / method / "metrics.jsonl")
        (step,) = (line for line in lines if "lr" in line)
        for name, value in LOGITS[family].items():
            assert step[name] == pytest.approx(value, rel=1e-6), (method, name)
        evaluated = [line for line in lines if I2T in line]
        assert [line["step"] for line in evaluated] == [0, 1], "the start is evaluated too"
        assert evaluated[0][I2T] == evaluated[1][I2T]
        assert list(read_events(tmp_path / method)) == []


@pytest.mark.parametrize(
    ("options", "evaluated"),
    [
        ({}, True),
        ({"data": {"evaluation_sets": "sets"}}, False),
        ({"data": {"evaluation_sets": "sets"}, "run": {"evaluate_every": 5}}, True),
        ({"data": {"evaluation_sets": "sets"}, "run": {"best_metric": I2T}}, True),
        ({"run": {"normalizer_anchors": 5}}, False),
        ({"model": {}, "run": {"evaluate_every": 5}}, False),
    ],
)
def test_the_start_is_evaluated_if_that_is_cheap_or_evaluations_are_frequent(
    options: dict[str, Any], evaluated: bool
) -> None:
    config = validate({"model": {"pretrained": "someone/clip"}, **options})
    assert evaluates_start(config) == evaluated


class Engine:
    """Stands for an engine, which these evaluations do not use."""


def evaluate(folder: Path, results: Mapping[int, dict[str, float]], first: int = 0, last: int | None = None) -> None:
    """Run the hook as in a run whose evaluations have the given `results`, by step."""
    config = validate({"model": {"pretrained": "someone/clip"}, "run": {"evaluate_every": 1}})
    with MetricsLog(folder, resume_step=first) as metrics:
        loop: Any = SimpleNamespace(
            context=SimpleNamespace(config=config, engine=Engine(), communicator=Communicator()),
            loss=None,
            folder=folder,
            metrics=metrics,
            events=EventLog(folder, rank=0),
            done=first,
            saved=10,
            total=max(results),
            stop_requested=False,
        )
        saver: Any = None
        evaluator: Any = MagicMock(side_effect=lambda engine, loss: results[loop.done] | {f"chance/{I2T}": 0.1})
        hook = EvaluateModel(evaluator, saver, average=None)
        hook.start(loop)
        for step in range(first + 1, (last or max(results)) + 1):
            loop.done = step
            metrics.write(step, {"uniformity": 1.0})  # of another hook; not an evaluation
            hook.after_step(loop, loop)
        if loop.done == loop.total:
            hook.finish(loop)


def test_the_first_and_the_last_evaluation_are_compared_with_the_start(tmp_path: Path) -> None:
    results = {
        0: {I2T: 0.4, T2I: 0.4, "task/a": 0.6, "task/b": 0.2},
        1: {I2T: 0.3, T2I: 0.45, "task/a": 0.7, "task/b": 0.2},
        2: {I2T: 0.1, T2I: 0.1, "task/a": 0.1, "task/b": 0.1},
        3: {I2T: 0.5, T2I: 0.6, "task/a": 0.3, "task/b": 0.3},
    }
    evaluate(tmp_path, results, last=2)
    evaluate(tmp_path, results, first=2)  # resumed
    first, last = read_events(tmp_path)
    assert (first.step, first.kind, last.step) == (1, "below_start", 3)
    assert "the mean recall@1 is 0.375 instead of 0.4." in first.message
    assert "the mean of 2 other scores is 0.3 instead of 0.4." in last.message
    assert "Lower optimizer.lr" in last.message and f"evaluate {tmp_path} --blend" in last.message


def test_scores_that_did_not_fall_are_not_mentioned() -> None:
    start = {I2T: 0.4, T2I: 0.4, "image_to_text_recall@5": 0.9, "zero_shot_top1": 0.5, "chance/zero_shot_top1": 0.1}
    assert scores_below(start, {**start, "image_to_text_recall@5": 0.1}, None) == []
    assert scores_below(start, {**start, T2I: 0.3}, I2T) == [], "only one of them is the run's target"
    assert scores_below(start, {**start, I2T: 0.3}, I2T) == [f"{I2T} is 0.3 instead of 0.4"]
    assert scores_below(start, {**start, "zero_shot_top1": 0.4}, None) == ["zero_shot_top1 is 0.4 instead of 0.5"]
