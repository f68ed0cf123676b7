"""`neuclip-ds plan` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

from small_runs import SMALL, call


def test_scale(tmp_path: Path) -> None:
    where = ["--nodes", "1", "4", "--gpus", "2", "--rows", "8", "--machine", "a100", "--networks", "ethernet"]
    methods = ["--methods", "openclip_reference", "openclip", "neuclip"]
    done = call("tools/plan.py", "scale", "demo", *methods, *where, "--out", str(tmp_path), *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scale.json").read_text())
    rows = {(one["method"], one["nodes"]): one for one in found["predicted"]}
    assert len(rows) == 6 and found["machine"] == "a100"
    assert (tmp_path / "scale.png").read_bytes()[1:4] == b"PNG"
    reference, ours = (rows[method, 4] for method in ("openclip_reference", "openclip"))
    others = 7 * 8  # rows of the other ranks
    # features' gradients travel in the one, indices and normalisers in the other, and three scalars less in the one
    assert reference["received"] - ours["received"] == others * (2 * 16 * 4 - 8 - 2 * 4) - 2 * 7 * 3 * 4 // 8
    for one in rows.values():
        parts = one["computation"] + one["exposed"]
        assert parts <= one["step"] <= 1.05 * parts and one["exposed"] <= one["communication"]
        assert one["batch"] / one["step"] == one["samples_per_second"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    nothing = call("tools/plan.py", "fit", str(tmp_path), "--cores", "2")
    assert nothing.returncode == 2 and "`neuclip-ds profile` writes them" in nothing.stderr
    machine = call("tools/plan.py", "scale", "demo", "--machine", "z80")
    assert machine.returncode == 2 and "h100" in machine.stderr
