"""Test whole runs on GPUs as a user starts them: with each launcher, resumed after kills, profiled, and timed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ROOT, SMALL, demo_shards, ends, environment, start, train
from test_launch import DEEPSPEED, TORCHRUN, free_port
from test_resume import compare, whole_and_broken

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_shards(tmp_path_factory.mktemp("demo") / "data", 300)


@pytest.fixture(scope="module")
def gpus(device: str) -> int:
    """Return the number of ranks to launch: one per GPU but at most 8, or 2 on the CPU."""
    return min(8, torch.cuda.device_count()) if device == "cuda" else 2


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_launcher_starts_a_rank_on_each_gpu(
    launcher: str, gpus: int, device: str, shards: Path, tmp_path: Path
) -> None:
    start = [TORCHRUN, "--standalone", f"--nproc-per-node={gpus}"]
    if launcher == "deepspeed":
        kind = "gpus" if device == "cuda" else "accelerators"
        start = [DEEPSPEED, f"--num_{kind}={gpus}", f"--master_port={free_port()}"]
    options = [f"--data.train={shards}", f"--data.batch_size={8 * gpus}", "--data.val=", "--data.zero_shot="]
    options += ["--max_steps=4", "--run.log_every=1", "--run.name=run", "--deepspeed=zero1_bf16"]
    options += ["--model.text.packed=true"]
    run = [*start, str(ROOT / "train.py"), "demo", *SMALL, *options]
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("engine", ["zero0_fp32", "zero1_bf16", "zero2_bf16", "zero2_bf16_offload", "zero3_bf16"])
def test_a_deterministic_run_resumes_bit_for_bit(engine: str, gpus: int, shards: Path, tmp_path: Path) -> None:
    options = [f"--deepspeed={engine}", "--run.deterministic=true", "--data.micro_batch=4"]
    compare(shards, tmp_path, *options, tensors=60, ranks=min(2, gpus))


def test_a_run_resumes_up_to_nondeterministic_kernels(shards: Path, tmp_path: Path) -> None:
    whole, broken = whole_and_broken(shards, tmp_path, "--deepspeed=zero1_fp32")
    whole_losses = [line["loss"] for line in whole["metrics"] if "loss" in line]  # type: ignore[attr-defined]
    broken_losses = [line["loss"] for line in broken["metrics"] if "loss" in line]  # type: ignore[attr-defined]
    assert broken_losses == pytest.approx(whole_losses, rel=1e-3)


def test_a_profile_shows_all_phases(shards: Path, tmp_path: Path) -> None:
    train(tmp_path / "runs", str(shards), 14, "--run.profile_steps=3")
    breakdown = json.loads((tmp_path / "runs" / "run" / "profile" / "breakdown.json").read_text())
    phases = {name: statistic["mean"] for name, statistic in breakdown["phases"].items()}
    assert set(phases) == {"forward", "objective", "normalizer", "backward", "optimizer"}
    assert min(phases.values()) > 0
    assert sum(phases.values()) < 1.1 * breakdown["seconds"]["total"]["mean"]
    assert breakdown["seconds"]["computation"]["mean"] > 0


def test_the_speed_of_steps_is_a_table(gpus: int, device: str, tmp_path: Path, record_property: Any) -> None:
    """The tool prints a table of speeds, which the test summary repeats for docs/reference/performance.md."""
    options = ["--recipe=models/vitb16", "--rows=256"] if device == "cuda" else [*SMALL, "--rows=8"]
    options += ["--parts=throughput", "--steps=10", "--methods", "openclip", "fastclip_v3"]
    options += [f"--ranks={gpus}", "--precision=bf16"]
    (done,) = ends(start("tools/benchmark_step.py", *options, folder=tmp_path), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for method in ("openclip", "fastclip_v3"):
        row = rf"\| {gpus} x [^|]+ \| [\w/]+ \| zero1_bf16 \| {method} \| \d+ \| [\d,.]+ \| [\d.]+ \| ([\d.]+|-) \|"
        assert re.search(row, done.stdout), done.stdout
    record_property("speed", done.stdout)
