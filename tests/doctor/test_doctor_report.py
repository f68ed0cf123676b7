"""The report: what is wrong first, in 80 columns."""

from __future__ import annotations

import json
from dataclasses import replace

from neuclip_ds.doctor.finding import Finding, fine, warning, wrong
from neuclip_ds.doctor.report import as_json, text


def placed(finding: Finding, check: str, where: str) -> Finding:
    return replace(finding, check=check, where=where)


FOUND = [
    placed(fine("The nodes' clocks are within 0.0 s."), "clocks", "rank 0 on node1"),
    *(
        placed(fine(figures={"memory, GB/s": 3000.0 + n, "matmul, TFLOP/s": 400.25}), "m", f"rank {n} on node1")
        for n in (0, 1)
    ),
    *(placed(fine(facts={"torch": "2.15"}), "versions", f"node{n}") for n in (1, 2)),
    placed(warning("Slow.", "Wait."), "disk speed", "node2"),
    *(placed(wrong("The limit is low. " * 10, "Raise it. " * 20), "open files", f"node{n}") for n in range(6)),
]


def test_problems_come_first_with_their_fixes() -> None:
    lines = text(FOUND).splitlines()
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if line.isupper() or line.startswith("FIGURES")]
    assert titles == ["WRONG", "WARNINGS", "FINE", "FIGURES, lowest - highest"]
    assert lines[1].startswith("  open files (node0, node1, node2, node3 and 2 more): The limit is low.")
    assert any(line.startswith("    Fix: Raise it.") for line in lines)
    assert lines[-1] == "6 wrong, 1 warning."


def test_figures_are_ranges_and_facts_stand_once() -> None:
    lines = text(FOUND).splitlines()
    assert "  memory, GB/s     3,000 - 3,001" in lines and "  matmul, TFLOP/s  400" in lines
    assert lines.count("  versions: torch 2.15") == 1
    assert text(FOUND[:1]).splitlines()[-1] == "Nothing is wrong, 0 warnings."


def test_json_has_every_finding() -> None:
    report = json.loads(json.dumps(as_json(FOUND)))
    assert (report["wrong"], report["warning"], report["fine"]) == (6, 1, 5)
    assert (
        report["findings"][1]["figures"]["memory, GB/s"] == 3000.0
        and report["findings"][1]["where"] == "rank 0 on node1"
    )
