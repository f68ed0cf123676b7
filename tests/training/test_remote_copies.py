"""A run copies its checkpoints to a remote store, and resumes from the copy on a different machine."""

import json
import shutil
from pathlib import Path

import pytest
from small_runs import newest_checkpoint, tensors, train

from neuclip_ds.reporting.metrics import read_metrics

OPTIONS = ("--run.checkpoint_every=2", "--run.log_every=1", "--run.keep_checkpoints=1")


def names(store: Path) -> list[str]:
    return sorted(path.parent.name for path in store.glob("run/checkpoints/step_*/meta.json"))


@pytest.mark.slow
def test_a_machine_without_the_run_resumes_from_the_copy(shards: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    # the learning rates do not depend on the run's length
    options = (*OPTIONS, "--optimizer.schedule=constant", "--optimizer.warmup_steps=0")
    with_copy = (*options, f"--run.remote=file://{store}")
    train(tmp_path / "here", shards, 4, *with_copy, ranks=2)
    assert names(store)[-1] == "step_000000004", "those before are left out where the copy takes longer than two steps"
    assert json.loads((store / "run" / "complete.json").read_text()) == {"step": 4}
    shutil.rmtree(tmp_path / "here")

    second = train(tmp_path / "there", shards, 6, *with_copy, ranks=2)
    assert "fetched checkpoint step_000000004 from" in second.stderr + second.stdout
    assert names(store)[-2:] == ["step_000000004", "step_000000006"]
    steps = [record["step"] for record in read_metrics(tmp_path / "there/run/metrics.jsonl") if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6], "metrics came with it"
    train(tmp_path / "uninterrupted", shards, 6, *options, ranks=2)
    assert tensors(newest_checkpoint(tmp_path / "there")) == tensors(newest_checkpoint(tmp_path / "uninterrupted"))
