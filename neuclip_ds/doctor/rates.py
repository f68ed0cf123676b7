"""The measured rates as a machine of the cost model, which `neuclip-ds plan scale --machine FILE` reads."""

import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from neuclip_ds.doctor.checks.all_reduce import CALLS, LINK
from neuclip_ds.doctor.checks.matmul import BF16, FLOAT32
from neuclip_ds.doctor.checks.memory_bandwidth import MEMORY, SIZE
from neuclip_ds.doctor.comparisons import gpu_name
from neuclip_ds.doctor.finding import Finding
from neuclip_ds.planning.machines import data_sheet

_INNER, _BETWEEN = " of one node", " between nodes"
_DIGITS = 4


def machine(found: Sequence[Finding]) -> dict[str, Any] | None:
    """Return the machine that was measured, with the slowest rank's figures; None if its products were not measured.

    Links that were not measured, those between ranks with one rank and those within a node with several nodes, are of
    the data sheet where machines.yaml knows the GPU.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        for name, value in one.figures.items():
            values[name].append(value)
    slowest = {name: min(of_ranks) for name, of_ranks in values.items()}
    if not {BF16, FLOAT32, MEMORY, SIZE} <= slowest.keys():
        return None
    gpu = gpu_name(found)
    sheet = data_sheet(gpu) or {}
    measured = {
        "tower_tflops": max(slowest[BF16], slowest[FLOAT32]),  # CPUs may be slower in bf16
        "objective_tflops": slowest[FLOAT32],
        "memory_gb_per_s": slowest[MEMORY],
        "memory_gb": slowest[SIZE],
    }
    # a rate that was reached is no peak of which a share is reached
    reached: dict[str, Any] = {"nccl": bool(gpu), "objective_utilisation": 1.0}
    network: dict[str, Any] = {}
    if CALLS + _INNER in slowest:
        measured["link_gb_per_s"] = slowest[LINK + _INNER]
        hop = 1e6 / slowest[CALLS + _INNER] / (2 * (len(values[CALLS + _INNER]) - 1))
        reached |= {"inner_efficiency": 1.0, "inner_gb_per_s": measured["link_gb_per_s"], "inner_latency_us": hop}
    if CALLS + _BETWEEN in slowest:
        speed, nodes = slowest[LINK + _BETWEEN], len({one.where.rpartition(" on ")[2] for one in found})
        measured["link_gb_per_s"] = max(speed, sheet.get("link_gb_per_s", 0.0))
        messages = math.ceil(math.log2(nodes)) if gpu else len(values[CALLS + _BETWEEN]) - 1
        network = {"gb_per_s": speed, "latency_us": 1e6 / slowest[CALLS + _BETWEEN] / (2 * messages)}
        reached |= {"efficiency": 1.0, "node_gb_per_s": speed}
    return {
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": gpu or "CPU",
        "machine": _rounded({**sheet, **measured}),
        **({"network": _rounded(network)} if network else {}),
        "reached": _rounded(reached),
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for k, v in values.items()}
