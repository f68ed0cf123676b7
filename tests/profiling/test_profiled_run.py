"""Profile with `train.py --profile` and tools/profile_communication.py, as a user does."""

import json
from pathlib import Path

import pytest
from small_runs import SMALL, call, train

from neuclip_ds.profiling.breakdown import COLUMNS
from neuclip_ds.recipe import parse


def test_the_profile_flag_profiles_ten_steps() -> None:
    assert parse(["demo"]).config.run.profile_steps == 0
    assert parse(["demo", "--profile"]).config.run.profile_steps == 10
    assert parse(["demo", "--profile", "--run.profile_steps=3"]).config.run.profile_steps == 3


@pytest.mark.slow
def test_a_profiled_run_writes_a_breakdown(shards: Path, tmp_path: Path) -> None:
    train(tmp_path / "runs", shards, 14, "--profile", "--run.profile_steps=3", ranks=2)
    folder = tmp_path / "runs" / "run" / "profile"
    breakdown = json.loads((folder / "breakdown.json").read_text())
    assert (breakdown["method"], breakdown["steps"], breakdown["world_size"]) == ("fastclip_v3", 3, 2)
    assert {"features", "state", "normalizer", "gradient reduce"} < set(breakdown["purposes"])
    assert not [purpose for purpose in breakdown["purposes"] if " in " in purpose or "outside" in purpose]
    assert "profiled 3 steps" in (tmp_path / "runs" / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_profile_communication_compares_methods(tmp_path: Path) -> None:
    options = ["--methods", "openclip_reference", "openclip", "--world-sizes", "2", "--rows", "8", "--steps", "2"]
    call("tools/profile_communication.py", *options, f"--out={tmp_path}", *SMALL)
    reference, ours = json.loads((tmp_path / "breakdowns.json").read_text())
    assert set(ours["seconds"]) == set(COLUMNS)
    gradients = reference["purposes"]["feature gradients"]["bytes_sent"]
    assert gradients == 2 * 8 * 16 * 4, "2 (B - b) d values"
    assert "feature gradients" not in ours["purposes"]
    for name in ("report.md", "openclip_zero1_2ranks/trace.json.gz"):
        assert (tmp_path / name).stat().st_size > 0
