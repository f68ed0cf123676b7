"""Test the report and Weights & Biases hooks; a failure in either does not end a run."""

import json
import re
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from forks import Program
from small_runs import ROOT, environment, records, training
from tars import write_pairs

from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse
from neuclip_ds.training.hooks.optional import optional_hooks
from neuclip_ds.training.run_lock import LOCK

STAND_IN = Path(__file__).with_name("wandb_stand_in.py")


def run(folder: Path, tool: str, *options: str, **variables: str) -> CompletedProcess[str]:
    """Run a training script with the stand-in for wandb."""
    (folder / "site").mkdir(exist_ok=True)
    shutil.copy(STAND_IN, folder / "site" / "wandb.py")
    paths = f"{ROOT}:{folder / 'site'}"
    where = {**environment(), "PYTHONPATH": paths, "WANDB_CALLS": str(folder / "calls"), **variables}
    return Program(ROOT / tool, *options, "--run.log_every=1", "--run.wandb=team/clip", variables=where).wait()


def test_a_finished_run_stays_complete_whatever_fails_after_it(tmp_path: Path) -> None:
    write_pairs(tmp_path / "val", [9, 17])
    shards = write_pairs(tmp_path / "shards", [13, 13])  # batches of 8, 8, 8 and 2
    options = [*training(tmp_path, str(shards), 4), f"--data.val={tmp_path / 'val'}", "--run.evaluate_every=2"]
    folder = tmp_path / "run"
    (folder / "report.html").mkdir(parents=True)  # a folder where the report should be written
    (folder / LOCK).touch()  # left by an earlier launch
    done = run(tmp_path, "train.py", *options, WANDB_BREAKS="1")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "complete.json").read_text()) == {"step": 4}
    assert "report.html could not be written (IsADirectoryError" in done.stderr
    assert "Weights & Biases failed (OSError: the network is gone)" in done.stderr

    log = (folder / "log.txt").read_text()
    assert log.count("image_to_text_recall@1: ") == 2, "in the middle and at the end"
    scores = re.findall(r"INFO step (\d)/4  text_to_image_recall@10: [\d.]+ \(chance ([\d.]+)\)", log)
    assert scores == [("2", "0.385"), ("4", "0.385")]
    metrics_of_step = {line["step"]: line for line in records(folder / "metrics.jsonl") if "lr" in line}
    has_loss = ["loss" in metrics_of_step[step] for step in (1, 2, 3, 4)]
    assert has_loss == [True, True, True, False], "the last batch of an epoch is partial"
    last = re.search(r"step 4/4  loss ([-\d.]+)", log)
    assert last is not None
    assert float(last[1]) == round(metrics_of_step[3]["loss"], 4), "that of the newest full batch"

    (folder / "report.html").rmdir()
    again = run(tmp_path, "train.py", *options)
    assert again.returncode == 0, again.stderr
    assert "is complete after 4 steps" in again.stderr
    page = (folder / "report.html").read_text()
    assert "<td>image_to_text_recall@1</td>" in page
    assert page.count('"meaning"') > 5


def test_a_run_that_diverges_has_failed_for_weights_and_biases_too(tmp_path: Path) -> None:
    shards = write_pairs(tmp_path / "shards", [20, 20])
    diverging = [*training(tmp_path, str(shards), 50), "--optimizer.lr=1e30", "--optimizer.warmup_steps=1"]
    ended = run(tmp_path, "tests/logged_train.py", *diverging)
    assert ended.returncode == 1, ended.stderr
    *_, event = records(tmp_path / "run" / "events.jsonl")
    assert event["kind"] == "diverged"
    assert f"to {event['step']} were skipped" in event["message"]
    assert "and there is no checkpoint to return to: lower optimizer.lr" in event["message"]
    assert [line for line in ended.stderr.splitlines() if line.startswith("error: ")] == [f"error: {event['message']}"]
    assert event["message"] in (tmp_path / "run" / "log.txt").read_text()
    seen = {line["step"]: line["indices"] for line in records(tmp_path / "run" / "samples" / "rank00000.jsonl")}
    assert event["indices"] == seen[event["step"]]
    init, finish = records(tmp_path / "calls")
    config = init.pop("config")
    assert len(init.pop("id")) == 8
    assert config["optimizer"]["lr"] == 1e30
    assert init == {
        "call": "init",
        "before_tensorboard": True,
        "project": "clip",
        "entity": "team",
        "name": "run",
        "resume": "allow",
        "dir": str(tmp_path / "run"),
        "sync_tensorboard": True,
    }
    assert finish == {"call": "finish", "exit_code": 1}


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_library_that_is_requested_must_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_folder: bool
) -> None:
    if with_folder:
        (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    config = parse(["demo", "--run.wandb=clip"]).config
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=r"pip install .*\[wandb\]'"):
        optional_hooks(config)
