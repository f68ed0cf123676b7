"""A killed run, started again with the same command, ends bit-equal to one that was never interrupted."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, call, demo_shards, read_options, start

TINY = [
    "--data.batch_size=32",
    "--data.workers=1",
    "--data.micro_batch=8",
    *SMALL,
    "--objective.method=neuclip",
    "--objective.npn.prototypes=64",
    "--objective.npn.restart_every=5",
    "--run.checkpoint_every=4",
    "--run.log_every=1",
    "--budget.steps=14",  # into the second epoch
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_shards(tmp_path_factory.mktemp("demo") / "data", 300)


def command(shards: Path, runs: Path, name: str, *options: str) -> list[str]:
    where = [f"--data.train={shards}", f"--run.folder={runs}", f"--run.name={name}"]
    return ["train.py", "demo", *where, *read_options([*TINY, *options])]


def complete(command: list[str]) -> None:
    done = call(*command)
    assert done.returncode == 0, done.stdout + done.stderr


def kill_after(command: list[str], metrics: Path, steps: int) -> None:
    """Starts the command and kills it with its workers once `steps` steps have been logged."""
    (program,) = start(*command)
    limit = time.monotonic() + 120
    while time.monotonic() < limit and program.running:
        if metrics.is_file() and metrics.read_text().count("\n") >= steps:
            break
        time.sleep(0.005)
    program.kill()


def final_state(run: Path) -> dict[str, object]:
    """Everything that training leaves: tensors as bytes, metrics without times."""
    folder = max((run / "checkpoints").glob("step_*"))
    state: dict[str, object] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for key, value in load_file(path).items():
            state[f"{path.name}/{key}"] = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    counters = json.loads((folder / "engine" / "engine.json").read_text())["counters"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("samples_per_second", "data_wait_share")
    state["metrics"] = [{key: value for key, value in line.items() if key not in timed} for line in lines]
    return state | counters


def whole_and_broken(shards: Path, runs: Path, *options: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return what a run leaves that is never interrupted, and one that is killed twice."""
    complete(command(shards, runs, "whole", *options))
    broken_off = command(shards, runs, "broken", *options)
    for steps in (6, 10):
        kill_after(broken_off, runs / "broken" / "metrics.jsonl", steps)
    complete(broken_off)
    return final_state(runs / "whole"), final_state(runs / "broken")


def compare(shards: Path, runs: Path, *options: str, tensors: int = 3 * 30) -> None:
    whole, broken = whole_and_broken(shards, runs, *options)
    assert len(whole["metrics"]) == 15  # type: ignore[arg-type]
    assert whole.keys() == broken.keys()
    assert sum(isinstance(value, bytes) for value in whole.values()) > tensors, "weights and both moments"
    assert whole["global_steps"] == 14
    assert [key for key in whole if whole[key] != broken[key]] == []


@pytest.mark.parametrize("engine", ["zero1_bf16"])
def test_killed_twice_and_resumed(engine: str, shards: Path, tmp_path: Path) -> None:
    compare(shards, tmp_path, f"--deepspeed={engine}")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["neuclip", "fastclip_v3", "openclip"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_precision(stage: int, precision: str, method: str, shards: Path, tmp_path: Path) -> None:
    compare(shards, tmp_path, f"--deepspeed=zero{stage}_{precision}", f"--objective.method={method}")


PARTS = [
    "--model.vision.train=0",
    "--model.text.lora.rank=2",
    "--model.text.lora.dropout=0.1",
    "--optimizer.vision.layer_decay=0.5",
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1_bf16", "zero3_fp32"])
def test_frozen_parts_and_adapters(engine: str, shards: Path, tmp_path: Path) -> None:
    compare(shards, tmp_path, f"--deepspeed={engine}", *PARTS, tensors=30 + 2 * 15)


def test_what_trains_cannot_change_in_a_run(shards: Path, tmp_path: Path) -> None:
    complete(command(shards, tmp_path, "run", "--budget.steps=1", *PARTS[:2]))
    for option, words in ((PARTS[2], "model.text.lora="), ("--model.vision.train=all", "model.vision.train=0")):
        done = call(*command(shards, tmp_path, "run", "--budget.steps=2", *PARTS[:2], option))
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_checkpoint_of_other_data_is_refused(shards: Path, tmp_path: Path) -> None:
    complete(command(shards, tmp_path, "run", "--budget.steps=2"))
    done = call(*command(shards, tmp_path, "run", "--budget.steps=3", "--run.seed=5"))
    assert done.returncode == 2
    assert "seed=0, but this run has seed=5" in done.stderr
    assert "Traceback" not in done.stderr
