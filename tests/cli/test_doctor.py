"""`neuclip-ds doctor` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import call

from neuclip_ds.doctor.table import CHECKS
from neuclip_ds.objectives import METHODS
from neuclip_ds.planning.machines import find_machine


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is wrong in one thing."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    options = ["--quick", "--json=found.json", "--data.batch_size=16", f"--data.cache_dir={tmp_path}"]
    done = call("tools/doctor.py", *options, "--data.cache_gb=0.001", folder=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    lines = done.stdout.splitlines()
    assert lines[0] == "WRONG" and lines[1].startswith("  precision (") and max(map(len, lines)) <= 80
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["check"] for one in found["findings"] if one["level"] == "wrong"] == ["precision"], said
    seen = {one["check"] for one in found["findings"]}
    assert seen >= {check.name for check in CHECKS if check.quick} - {"clocks"}, "one node has one clock"
    assert not (tmp_path / "runs/doctor/machine.json").exists()


def test_a_batch_that_the_ranks_do_not_divide_is_a_finding(tmp_path: Path) -> None:
    done = call("tools/doctor.py", "--quick", "--data.batch_size=15", folder=tmp_path, ranks=2)
    assert done.returncode == 1
    assert "shared memory" in done.stdout and "not divisible by the 2 ranks" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_everything(ranks: int, tmp_path: Path) -> None:
    options = ["--json=found.json", "--data.batch_size=16", f"--data.cache_dir={tmp_path}", "--data.cache_gb=0.001"]
    done = call("tools/doctor.py", *options, folder=tmp_path, ranks=ranks)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["wrong"] == 0
    (agreement,) = {one["message"] for one in found["findings"] if one["check"] == "methods"}
    assert int(agreement.split()[0]) >= len(METHODS)
    trained = [one["message"] for one in found["findings"] if one["check"] == "training"]
    assert [message.count("zero") for message in trained] == [4, 6] and all("agree" in one for one in trained)
    path = str(tmp_path / "runs/doctor/machine.json")
    if ranks == 2:
        assert find_machine(path, "ethernet").fast.network.inner_bandwidth > 0
        arguments = ["--nodes", "1", "--gpus", "2", "--rows", "8", "--machine", path, "--networks", "ethernet"]
        assert call("tools/plan.py", "scale", "demo", *arguments, folder=tmp_path).returncode == 0
