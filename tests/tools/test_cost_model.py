"""Check the cost model's formulas, and the table that its program prints."""

from dataclasses import replace

import pytest
from cost_model import Cluster, Compute, Network, collective_seconds, step_time
from small_runs import SMALL, call
from step_costs import Call, Work

from neuclip_ds.distributed.communicator import ring_bytes

COMPUTE = Compute(overhead=0.02, tower_rate=4e10, objective_rate=1e10, element_rate=5e8, update_rate=5e7, skew=0.1)
NETWORK = Network(start=1e-5, inner_latency=2e-6, inner_bandwidth=5e8, latency=1e-5, bandwidth=1e8)
GATHERED = 4096 * 64  # bytes of the features of one side
REDUCED = 2_000_000
WORK = Work(
    tower_flops=64e9,
    image_share=0.7,
    objective_flops=3e7,
    objective_elements=3e7,
    updated=1e6,
    hooks=0,
    calls=[
        Call(purpose="features", op="all_gather", size=GATHERED, times=2),
        Call(purpose="gradient reduce", op="all_reduce", size=REDUCED),
    ],
)


def test_a_ring_crosses_nodes_at_their_bandwidth_and_latency() -> None:
    size = 10**9
    one_node = collective_seconds("all_gather", size, Cluster(nodes=1, ranks_per_node=8, network=NETWORK))
    four_nodes = collective_seconds("all_gather", size, Cluster(nodes=4, ranks_per_node=2, network=NETWORK))
    assert one_node == pytest.approx(1e-5 + 7 * 2e-6 + ring_bytes("all_gather", size, 8) / 5e8)
    assert four_nodes == pytest.approx(1e-5 + 7 * 1e-5 + ring_bytes("all_gather", size, 8) / 1e8)
    assert collective_seconds("all_gather", size, Cluster(nodes=1, ranks_per_node=1, network=NETWORK)) == 0


def test_small_all_reduces_send_fewer_messages_along_a_tree() -> None:
    seconds = collective_seconds("all_reduce", 8, Cluster(nodes=4, ranks_per_node=2, network=NETWORK))
    assert seconds == pytest.approx(1e-5 + 2 * (2 * 1e-5 + 2e-6) + ring_bytes("all_reduce", 8, 8) / 1e8)


def test_communication_during_computation_is_not_exposed() -> None:
    """The image tower can hide all feature gathers but the last; the backward pass hides reductions if configured."""
    cluster = Cluster(nodes=1, ranks_per_node=4, network=NETWORK)
    gather = collective_seconds("all_gather", GATHERED, cluster)
    reduction = collective_seconds("all_reduce", REDUCED, cluster)
    assert step_time(WORK, COMPUTE, cluster).exposed == pytest.approx(gather + reduction)
    assert step_time(replace(WORK, overlaps=True), COMPUTE, cluster).exposed == pytest.approx(gather)
    no_towers = replace(WORK, overlaps=True, tower_flops=0.0)
    assert step_time(no_towers, COMPUTE, cluster).exposed == pytest.approx(2 * gather + reduction)


def test_a_step_takes_at_least_as_long_as_loading_its_pairs() -> None:
    cluster = Cluster(nodes=1, ranks_per_node=4, network=NETWORK)
    slow_loader = replace(COMPUTE, loading_rate=100.0)
    without_loader = step_time(WORK, slow_loader, cluster)
    with_loader = step_time(replace(WORK, rows=1000), slow_loader, cluster)
    assert without_loader.loading == 0
    assert without_loader.total < 10
    assert with_loader.total == pytest.approx(10)


@pytest.mark.slow
def test_the_program_prints_a_range_for_every_method_and_number_of_nodes() -> None:
    methods = ["openclip_reference", "openclip", "neuclip"]
    done = call("tools/cost_model.py", "demo", "--methods", *methods, "--nodes", "1", "4", "--rows", "8", *SMALL)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    settings = [(method, nodes, batch) for method in methods for nodes, batch in (("1", "64"), ("4", "256"))]
    assert [tuple(row[:3]) for row in rows] == settings
    assert all(" - " in row[3] for row in rows)
