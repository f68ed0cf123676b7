"""The checkpoint with the best evaluation score is kept, even after worse checkpoints follow."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from small_checkpoints import keeper
from small_runs import train
from tars import write_pairs

from neuclip_ds.checkpoint.checkpoints import Best, read_best, step_folder
from neuclip_ds.checkpoint.integrity import SaveFailed
from neuclip_ds.checkpoint.saved_model import find_best_checkpoint
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.reporting.events import EventLog, read_events
from neuclip_ds.reporting.metrics import read_metrics
from neuclip_ds.training.checkpointing import SaveCheckpoints
from neuclip_ds.training.hooks.evaluation import EvaluateModel

METRIC = "image_to_text_recall@1"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("best")
    write_pairs(folder / "val", [26])
    return str(write_pairs(folder / "shards", [13, 13]))


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_the_start_is_measured(shards: str, tmp_path: Path) -> None:
    options = [
        f"--data.val={Path(shards).parent}/val",
        f"--run.best_metric={METRIC}",
        "--run.evaluate_every=2",
        "--run.keep_checkpoints=1",
    ]
    train(tmp_path, shards, 10, *options, "--optimizer.lr=0.01", "--optimizer.warmup_steps=0")
    folder = tmp_path / "run" / "checkpoints"
    scores = {int(x["step"]): x[METRIC] for x in read_metrics(tmp_path / "run" / "metrics.jsonl") if METRIC in x}
    assert sorted(scores) == [0, 2, 4, 6, 8, 10]
    best = read_best(folder)
    assert best is not None
    trained = {step: score for step, score in scores.items() if step}
    assert (best.metric, best.value) == (METRIC, max(trained.values()))
    assert best.step == min(step for step, score in trained.items() if score == best.value), "the first of equals"
    meta = json.loads((step_folder(folder, best.step) / "meta.json").read_text())
    assert meta["step"] == best.step
    assert len(list(folder.glob("step_*"))) <= 3, "the newest, the best, and the one it has just replaced"


def test_a_best_checkpoint_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no best checkpoint"):
        find_best_checkpoint(tmp_path)
    keeper(tmp_path).keep_best(Best(5, METRIC, 0.5))
    with pytest.raises(UserError, match="step_000000005, is missing or incomplete"):
        find_best_checkpoint(tmp_path)


def test_an_unknown_metric_is_refused_before_the_first_step() -> None:
    context = SimpleNamespace(
        config=parse(["demo", "--run.best_metric=recall"]).config, engine=None, communicator=Communicator()
    )
    loop: Any = SimpleNamespace(
        context=context,
        loss=None,
        folder=Path("run"),
        metrics=None,
        done=0,
        saved=0,
        total=3,
    )
    saver: Any = None

    evaluator: Any = MagicMock(return_value={METRIC: 0.5})

    with pytest.raises(UserError, match=rf"run\.best_metric=recall is not a metric .*{METRIC}"):
        EvaluateModel(evaluator, saver, average=None).start(loop)


def test_saves_that_fail_in_one_step_count_once(tmp_path: Path) -> None:
    """Without disk space, a step that evaluates would otherwise try to save, and fail, three times."""
    config = parse(["demo", "--run.checkpoint_every=1", "--run.evaluate_every=1", f"--run.best_metric={METRIC}"]).config
    context = SimpleNamespace(config=config, engine=None, communicator=Communicator())
    loop: Any = SimpleNamespace(
        context=context, loss=None, folder=tmp_path, metrics=None, done=0, saved=0, total=9, stop_requested=False
    )
    (tmp_path / "metrics.jsonl").touch()
    loop.checkpoints = keeper(tmp_path)
    loop.events = EventLog(tmp_path, 0)
    loop.save = MagicMock(side_effect=SaveFailed("The disk is full."))
    saver = SaveCheckpoints()
    saver.start(loop)
    evaluate = EvaluateModel(MagicMock(return_value={METRIC: 0.5}), saver, average=None)  # type: ignore[arg-type]
    result: Any = SimpleNamespace(applied=True)

    for step in (1, 2):
        loop.done = step
        for hook in (saver, evaluate):
            hook.after_step(loop, result)
    assert loop.save.call_count == 2
    assert [(event.step, event.kind) for event in read_events(tmp_path)] == [(1, "save_failed"), (2, "save_failed")]
    loop.done = 3
    with pytest.raises(UserError, match=r"3 saves in a row have failed"):
        saver.after_step(loop, result)
