"""A run whose checkpoints are copied to a remote store, and that resumes from there on another machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_runs import demo_shards, newest_checkpoint, train

from neuclip_ds.reporting.events import read_events

EVERY = ("--run.checkpoint_every=2", "--run.log_every=1", "--run.keep_checkpoints=1")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(demo_shards(tmp_path_factory.mktemp("data"), 60))


def state(runs: Path) -> dict[str, bytes]:
    files = sorted(newest_checkpoint(runs).rglob("*.safetensors"))
    return {f"{file.name}/{name}": value.numpy().tobytes() for file in files for name, value in load_file(file).items()}


def steps(runs: Path) -> list[int]:
    lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


def names(store: Path) -> list[str]:
    return sorted(path.parent.name for path in store.glob("run/checkpoints/step_*/meta.json"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_machine_without_the_run_resumes_from_the_copy(tmp_path: Path, shards: str, ranks: int) -> None:
    store, here, there = tmp_path / "store", tmp_path / "here", tmp_path / "there"
    every = (*EVERY, "--optimizer.schedule=constant", "--optimizer.warmup_steps=0")  # at any number of steps
    options = (*every, f"--run.remote=file://{store}", "--run.keep_remote=2")
    first = train(here, shards, 4, *options, ranks=ranks)
    assert first.returncode == 0, first.stderr
    assert names(store) == ["step_000000002", "step_000000004"]
    assert json.loads((store / "run" / "complete.json").read_text()) == {"step": 4}
    shutil.rmtree(here)

    second = train(there, shards, 6, *options, ranks=ranks)
    assert second.returncode == 0, second.stderr
    assert "fetched step_000000004 from" in second.stderr + second.stdout
    assert names(store) == ["step_000000004", "step_000000006"]
    assert steps(there) == [1, 2, 3, 4, 5, 6], "metrics came with it"
    whole = train(tmp_path / "whole", shards, 6, *every, ranks=ranks)
    assert whole.returncode == 0, whole.stderr
    assert state(there) == state(tmp_path / "whole")


@pytest.mark.slow
def test_never_resuming_refuses_a_copy_and_an_unusable_store_is_refused(tmp_path: Path, shards: str) -> None:
    store = tmp_path / "store"
    assert train(tmp_path / "runs", shards, 2, *EVERY, f"--run.remote={store}").returncode == 0
    refused = train(tmp_path / "other", shards, 2, f"--run.remote={store}", "--run.resume=never")
    assert refused.returncode == 2
    assert f"{store}/run holds checkpoints and run.resume=never" in refused.stderr
    (tmp_path / "file").write_text("")
    unusable = train(tmp_path / "other", shards, 2, f"--run.remote={tmp_path}/file/store")
    assert unusable.returncode == 2
    assert "run.remote: " in unusable.stderr and "cannot be read and written: " in unusable.stderr
    assert not (tmp_path / "other" / "run").exists()


@pytest.mark.slow
def test_training_outlives_a_store_that_fails(tmp_path: Path, shards: str) -> None:
    """A file is where the folder of a checkpoint should be."""
    store, blocking = tmp_path / "store", "step_000000004"
    (store / "run" / "checkpoints").mkdir(parents=True)
    (store / "run" / "checkpoints" / blocking).write_text("")
    done = train(tmp_path / "runs", shards, 4, *EVERY, f"--run.remote={store}")
    assert done.returncode == 0, done.stderr
    assert "The same command tries again." in done.stderr + done.stdout
    events = [event for event in read_events(tmp_path / "runs" / "run") if event.kind == "copy_failed"]
    assert events and "was not copied to" in events[-1].words
    assert blocking not in names(store)
    (store / "run" / "checkpoints" / blocking).unlink()
    again = train(tmp_path / "runs", shards, 4, *EVERY, f"--run.remote={store}")
    assert again.returncode == 0, again.stderr
    assert blocking in names(store)
