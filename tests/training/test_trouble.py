"""A run that diverges, from its command to what it leaves: words, samples, and a failed run in Weights & Biases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from forks import Program
from small_runs import ROOT, SMALL, demo_shards, environment

STAND_IN = ROOT / "tests" / "reporting" / "wandb_stand_in.py"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_diverged_run_names_the_step_and_its_samples(tmp_path: Path) -> None:
    data = demo_shards(tmp_path / "data", 40)
    (tmp_path / "site").mkdir()
    shutil.copy(STAND_IN, tmp_path / "site" / "wandb.py")
    command = [*("demo", *SMALL, f"--run.folder={tmp_path}", "--run.name=run", f"--data.train={data}")]
    command += ["--data.batch_size=8", "--data.workers=0", "--data.val=", "--data.zero_shot=", "--budget.steps=50"]
    command += ["--run.sample_log=true", "--run.log_every=1", "--run.wandb=clip", "--optimizer.lr=1e30"]
    variables = {**environment(), "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}", "WANDB_CALLS": str(tmp_path / "calls")}
    ended = Program(ROOT / "train.py", *command, "--optimizer.warmup_steps=1", variables=variables).wait()
    assert ended.returncode == 1, ended.stderr
    *_, event = lines(tmp_path / "run" / "events.jsonl")
    assert event["kind"] == "diverged"
    assert f"to {event['step']} were skipped" in str(event["words"])
    assert "and there is no checkpoint to return to: lower optimizer.lr" in str(event["words"])
    assert [line for line in ended.stderr.splitlines() if line.startswith("error: ")] == [f"error: {event['words']}"]
    assert str(event["words"]) in (tmp_path / "run" / "log.txt").read_text()
    seen = {line["step"]: line["indices"] for line in lines(tmp_path / "run" / "samples" / "rank00000.jsonl")}
    assert event["indices"] == seen[event["step"]]
    calls = lines(tmp_path / "calls")
    assert calls[0]["project"] == "clip"
    assert calls[0]["name"] == "run"
    assert calls[-1] == {"call": "finish", "exit_code": 1}
    logged = [str(call["loss"]) for call in calls if call["call"] == "log"]
    assert logged == [str(line["loss"]) for line in lines(tmp_path / "run" / "metrics.jsonl")]
