"""`neuclip-ds doctor` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import call, start

from neuclip_ds.cli import doctor_work
from neuclip_ds.cli.doctor import ENGINES
from neuclip_ds.doctor.request import Request
from neuclip_ds.doctor.table import CHECKS
from neuclip_ds.errors import UserError
from neuclip_ds.objectives import METHODS
from neuclip_ds.planning.machines import find_machine
from neuclip_ds.recipe import parse


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a machine that is wrong in one thing, for a run that is wrong in another."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    options = ["--quick", "--json=found.json", "--data.batch_size=15", f"--data.cache_dir={tmp_path}"]
    done = call("tools/doctor.py", *options, "--data.cache_gb=0.001", folder=tmp_path, ranks=2)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    lines = done.stdout.splitlines()
    assert lines[0] == "WRONG" and lines[1].startswith("  precision (") and max(map(len, lines)) <= 80
    assert "not divisible by the 2 ranks" in " ".join(done.stdout.split())
    found = json.loads((tmp_path / "found.json").read_text())
    wrong = [one["check"] for one in found["findings"] if one["level"] == "wrong"]
    assert wrong == ["precision", "shared memory"], said
    seen = {one["check"] for one in found["findings"]}
    assert seen >= {check.name for check in CHECKS if check.quick} - {"clocks"}, "one node has one clock"
    assert not (tmp_path / "runs/doctor/machine.json").exists()


def test_nodes_that_run_other_code_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differs = "rank 1 on node2 differs from rank 0 on node1 in neuclip_ds: 12ab instead of 34cd"

    def connected(task: str, folder: Path) -> None:
        raise UserError(differs)

    monkeypatch.setattr(doctor_work, "connected", connected)
    assert not doctor_work.diagnose(Request(parse(["demo"]).config, tmp_path, []), ["doctor"], None)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("WRONG") and differs in printed and "1 wrong" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "engines"), [(1, ["zero1_fp32"]), (2, ENGINES)])
def test_everything(ranks: int, engines: list[str], tmp_path: Path) -> None:
    options = ["--json=found.json", "--data.batch_size=16", f"--data.cache_dir={tmp_path}", "--data.cache_gb=0.001"]
    programs = start("tools/doctor.py", *options, "--engines", *engines, folder=tmp_path, ranks=ranks)
    try:
        done = [program.wait(timeout=1800) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [one.returncode for one in done] == ranks * [0], done[0].stdout + done[0].stderr
    found = json.loads((tmp_path / "found.json").read_text())
    agreement, *others = {one["message"] for one in found["findings"] if one["check"] == "methods"}
    assert int(agreement.split()[0]) >= len(METHODS) and (ranks > 1 or not others)
    trained = [one["message"] for one in found["findings"] if one["check"] == "training"]
    assert sum(message.count("zero") for message in trained) == len(engines)
    path = tmp_path / "runs/doctor/machine.json"
    measured = json.loads(path.read_text())["machine"]
    assert measured.get("link_gb_per_s", 0) > 0 or ranks == 1
    if ranks == 2:
        assert find_machine(str(path), "ethernet").fast.network.inner_bandwidth > 0
        arguments = ["--nodes", "1", "--gpus", "2", "--rows", "8", "--machine", str(path), "--networks", "ethernet"]
        assert call("tools/plan.py", "scale", "demo", *arguments, folder=tmp_path).returncode == 0
