"""What was measured as a machine of the cost model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from neuclip_ds.doctor.checks.all_reduce import CALLS, LINK
from neuclip_ds.doctor.checks.matmul import BF16, FLOAT32
from neuclip_ds.doctor.checks.memory_bandwidth import MEMORY, SIZE
from neuclip_ds.doctor.finding import Finding, fine
from neuclip_ds.doctor.rates import machine
from neuclip_ds.errors import UserError
from neuclip_ds.planning.machines import find_machine

GPUS = "8 x NVIDIA H100 80GB HBM3, 80 GiB"


def measured(ranks: int, nodes: int = 1, gpus: bool = True, link: float = 300.0) -> list[Finding]:
    where = "one node" if nodes == 1 else "between nodes"
    found = [fine(facts={"GPUs": GPUS})] if gpus else []
    for rank in range(ranks):
        figures = {BF16: 700.0 + rank, FLOAT32: 50.0, MEMORY: 3000.0, SIZE: 80.0}
        if ranks > 1:
            figures |= {f"{CALLS} {'of ' * (nodes == 1)}{where}": 5e4, f"{LINK} {'of ' * (nodes == 1)}{where}": link}
        found.append(fine(figures=figures))
    return [replace(one, where=f"rank {n} on node{n % nodes}") for n, one in enumerate(found)]


def written(found: list[Finding], tmp_path: Path) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine(found)))
    return str(path)


def test_the_cost_model_reads_what_was_measured(tmp_path: Path) -> None:
    known = find_machine("h100", "infiniband").fast
    both = find_machine(written(measured(8), tmp_path), "infiniband")
    assert both.measured and both.memory_gb == 80
    assert both.slow.network.inner_bandwidth == 300e9, "what is measured is no range"
    found = both.fast
    assert found.compute.tower_rate == pytest.approx(known.compute.tower_rate * 700 / 989)  # of the slowest rank
    assert found.compute.objective_rate == 50e12 and found.network.inner_bandwidth == 300e9
    assert found.network.inner_latency == pytest.approx(1 / 5e4 / 14, rel=1e-3)
    assert found.network.bandwidth == known.network.bandwidth and found.network.trees


def test_several_nodes_bring_their_network(tmp_path: Path) -> None:
    found = find_machine(written(measured(16, nodes=2, link=40.0), tmp_path), "ethernet").fast.network
    assert found.bandwidth == 40e9 and found.latency == pytest.approx(1e-5)
    assert found.inner_bandwidth == pytest.approx(0.8 * 450e9), "of the data sheet"


def test_one_rank_has_the_links_of_the_data_sheet_or_none(tmp_path: Path) -> None:
    assert find_machine(written(measured(1), tmp_path), "ethernet").fast.network.inner_bandwidth == 0.8 * 450e9
    with pytest.raises(UserError, match=r"link_gb_per_s missing.*on two ranks"):
        find_machine(written(measured(1, gpus=False), tmp_path), "ethernet")
    cpu = find_machine(written(measured(2, gpus=False), tmp_path), "ethernet").fast
    assert not cpu.compute.overlaps_engine and not cpu.network.trees


def test_a_quick_look_measures_no_machine() -> None:
    assert machine(measured(1)[:1]) is None


def test_a_file_that_is_no_machine(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"machine": 3}', '{"machine": {"tower_tflops": 1}}'):
        (tmp_path / "machine.json").write_text(text)
        with pytest.raises(UserError, match=r"machine\.json"):
            find_machine(f"{tmp_path}/machine.json", "ethernet")
