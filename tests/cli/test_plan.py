"""`neuclip-ds plan` as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_runs import ROOT, SMALL, call

PAGE = ROOT / "docs" / "explanation" / "scaling.md"


@pytest.mark.slow
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
        for end in (0, 1):
            assert one["exposed"][end] <= one["communication"][1] and 0 < one["utilisation"][end] < 0.4
            assert one["batch"] / one["step"][end] == one["samples_per_second"][1 - end]
        assert one["step"][0] < one["step"][1], "a range, as nobody has measured the machine"
    assert f"{1e3 * rows['neuclip', 4]['step'][0]:,.0f} - {1e3 * rows['neuclip', 4]['step'][1]:,.0f} (" in done.stdout


@pytest.mark.slow
def test_the_page_has_the_errors_that_the_command_prints(tmp_path: Path) -> None:
    page = tmp_path / "scaling.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    done = call("tools/plan.py", "published", "--out", str(tmp_path), "--page", str(page))
    assert done.returncode == 0, done.stderr
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    tables = (tmp_path / "published.md").read_text().split("## ")[1:]
    assert len(tables) == 3 and all(f"<!-- {table.splitlines()[0]} -->" in page.read_text() for table in tables)
    cells = re.findall(r"([\d,]+): ([\d,]+) - ([\d,]+) \(", tables[0])
    times = [[int(number.replace(",", "")) for number in cell] for cell in cells]
    outside = [published for published, low, high in times if not low <= published <= high]
    assert len(times) == 68 and outside == [529], "NeuCLIP's with RN50, as the page has it"


def test_mistakes_are_named(tmp_path: Path) -> None:
    nothing = call("tools/plan.py", "fit", str(tmp_path), "--cores", "2")
    assert nothing.returncode == 2 and "`neuclip-ds profile` writes them" in nothing.stderr
    machine = call("tools/plan.py", "scale", "demo", "--machine", "z80")
    assert machine.returncode == 2 and "h100" in machine.stderr
