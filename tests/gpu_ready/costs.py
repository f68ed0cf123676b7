"""The table of what a rank asks of its GPU, costs.yaml next to this file, and the check against it.

A row holds for one call of its area: how often the host waits for the device, by the file that asks for it, and how
many operations the call launches. Fewer fail as well: lower the row then. REWRITE_COSTS=1 pytest tests/gpu_ready
writes what is found into the rows of the tests that run. A method without rows waits in no file where no other does.

Waits that remain are meant: a training step reads the gradient's norm to decide whether it is skipped
(engine/update.py; DeepSpeed's wrappers around the optimizer read it themselves), an evaluation reads its counts once at
its end, and the loss with `validate=True` its features' norms.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from fake_cuda import FakeGpu

_TABLE = Path(__file__).with_name("costs.yaml")
_HEAD = "# What one call of a rank asks of its GPU; costs.py explains the rows and how to rewrite them.\n"


def check(area: str, case: str, world_size: int, gpu: FakeGpu) -> None:
    """Compare what was counted since the last reset with the row; a case without one waits only where others do."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(_TABLE.read_text(encoding="utf-8")) or {}
    row = f"{case}, K={world_size}"
    found = {"launches": gpu.launches, "syncs": dict(sorted(gpu.syncs.items()))}
    if os.environ.get("REWRITE_COSTS"):
        table.setdefault(area, {})[row] = found
        _TABLE.write_text(_HEAD + _lines(table), encoding="utf-8")
        return
    rows = table.get(area, {})
    known = {file for other in rows.values() for file in other["syncs"]}
    waits = {file: count for file, count in found["syncs"].items() if file in known}
    wanted = rows.get(row, {**found, "syncs": waits})
    assert found == wanted, f"{area}: {row}: the table has {wanted}"


def _lines(table: dict[str, dict[str, Any]]) -> str:
    """Return the table as YAML with one row a line."""
    lines = []
    for area, rows in sorted(table.items()):
        lines.append(f"{area}:")
        for row, cost in rows.items():
            lines.append(f"  {row!r}: {yaml.safe_dump(cost, default_flow_style=True, width=1000).strip()}")
    return "\n".join(lines) + "\n"
