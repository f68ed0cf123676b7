"""Whole runs on a GPU, as a user starts them: resumed after kills, and profiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import demo_shards, train
from test_resume import compare, whole_and_broken

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_shards(tmp_path_factory.mktemp("demo") / "data", 300)


@pytest.mark.parametrize("engine", ["zero1_bf16", "zero2_bf16_offload", "zero3_bf16"])
def test_a_deterministic_run_resumes_bit_for_bit(engine: str, shards: Path, tmp_path: Path) -> None:
    compare(shards, tmp_path, f"--deepspeed={engine}", "--run.deterministic=true")


def test_a_run_resumes_up_to_nondeterministic_kernels(shards: Path, tmp_path: Path) -> None:
    whole, broken = whole_and_broken(shards, tmp_path, "--deepspeed=zero1_fp32")
    losses = [[line["loss"] for line in found["metrics"] if "loss" in line] for found in (whole, broken)]  # type: ignore[attr-defined]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_profile_shows_all_phases(shards: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "runs", str(shards), 14, "--run.profile_steps=3")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs" / "run" / "profile" / "breakdown.json").read_text())
    phases = {name: of["mean"] for name, of in found["phases"].items()}
    assert set(phases) == {"forward", "objective", "backward", "optimizer"}
    assert min(phases.values()) > 0
    assert sum(phases.values()) < 1.1 * found["seconds"]["total"]["mean"]
    assert found["seconds"]["computation"]["mean"] > 0
