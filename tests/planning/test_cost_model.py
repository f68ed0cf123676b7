"""The cost model gives a known machine back from what it would have shown, and adds up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.errors import UserError
from neuclip_ds.planning.cost_model import (
    Call,
    Cluster,
    Compute,
    Network,
    Observation,
    Work,
    collective_seconds,
    fit,
    from_json,
    step_time,
    to_json,
)
from neuclip_ds.planning.machines import find_machine, network_names

COMPUTE = Compute(0.02, 4e10, 1e10, 5e8, 5e7, 1e4, skew=0.1, cores=2, sharing=0.4)
NETWORK = Network(start=1e-3, inner_latency=2e-4, inner_bandwidth=5e8)


def work(rows: int, ranks: int, stage_3: int = 0) -> Work:
    """Grows with rows and ranks as that of a method does, and differs enough that every rate shows."""
    calls = [
        Call("features", "all_gather", 4096 * rows, 2),
        Call("normalizer", "all_reduce", 16 * rows * ranks, 11),
        Call("gradient reduce", "all_reduce", 2_000_000),
    ]
    return Work(
        1e9 * rows, 0.7, 2e3 * rows**2 * ranks, 1e5 * rows * ranks, 4e6 / ranks, stage_3, calls if ranks > 1 else []
    )


def observed(rows: int, ranks: int, stage_3: int = 0) -> Observation:
    cluster, done = Cluster(1, ranks, NETWORK), work(rows, ranks, stage_3)
    time, slow = step_time(done, COMPUTE, cluster), COMPUTE.slowdown(ranks)
    transfers = [(call, slow * collective_seconds(call.op, call.size, cluster)) for call in done.calls]
    return Observation(done, ranks, time.total, transfers)


def test_a_known_machine_is_found_again() -> None:
    cases = [(rows, ranks, 0) for rows in (16, 64, 256) for ranks in (1, 2, 4)] + [(64, 1, 50), (64, 2, 50)]
    found, network = fit([observed(*case) for case in cases], cores=2)
    for wanted, fitted in ((COMPUTE, found), (NETWORK, network)):
        for name in wanted.__dataclass_fields__:
            assert getattr(fitted, name) == pytest.approx(getattr(wanted, name), rel=1e-3), name


def test_nothing_is_fitted_below_zero() -> None:
    """Times that fall with the work give no negative rate."""
    slow = [observed(rows, 1)._replace(total=1.0 / rows) for rows in (16, 64, 256)]
    found, network = fit(slow, cores=2)
    assert min(found.overhead, found.tower_rate, found.objective_rate, found.update_rate) >= 0
    assert network.start == 0, "one rank shows no network"


def test_ranks_beyond_the_cores_slow_each_other_down() -> None:
    one, two, four = (step_time(work(64, 2), COMPUTE, Cluster(1, ranks, NETWORK)).computation for ranks in (1, 2, 4))
    assert two - 0.02 == pytest.approx(1.4 * (one - 0.02)) and four == pytest.approx(2 * two)


def test_the_ring_crosses_nodes_at_their_bandwidth() -> None:
    network = Network(1e-5, 2e-6, 4e11, latency=1e-5, bandwidth=1e10)
    size = 10**9
    within, between = (collective_seconds("all_reduce", size, Cluster(n, 8 // n, network)) for n in (1, 4))
    assert within == pytest.approx(1e-5 + 14 * 2e-6 + ring_bytes("all_reduce", size, 8) / 4e11)
    assert between == pytest.approx(1e-5 + 14 * 1e-5 + ring_bytes("all_reduce", size, 8) / 1e10)
    assert collective_seconds("all_gather", size, Cluster(1, 1, network)) == 0


def test_a_tree_takes_small_all_reduces_over_many_nodes() -> None:
    ring = Network(0, 1e-6, 1e12, latency=1e-5, bandwidth=1e12)
    tree = Network(0, 1e-6, 1e12, latency=1e-5, bandwidth=1e12, trees=True)
    times = [collective_seconds("all_reduce", 8, Cluster(64, 8, network)) for network in (ring, tree)]
    assert times == pytest.approx([2 * 511 * 1e-5, 2 * (6 * 1e-5 + 7 * 1e-6)], rel=1e-3)


def test_what_travels_under_computation_is_not_exposed() -> None:
    """Features but the last of the images under the image tower; the engine's where device and config allow it."""
    cluster = Cluster(1, 4, NETWORK)
    slow = work(64, 4)
    fast = replace(COMPUTE, tower_rate=math.inf)
    hidden, exposed = (step_time(slow, compute, cluster).exposed for compute in (COMPUTE, fast))
    one = 2 * collective_seconds("all_gather", 4096 * 64, cluster)  # two ranks a core
    window = 0.7 / 3 * 2 * 1.4 * 1e9 * 64 / 4e10
    assert exposed - hidden == pytest.approx(min(one, window))
    beside = Compute(0.02, 4e8, 1e10, 5e8, 5e7, 1e4, overlaps_engine=True)
    reduction = collective_seconds("all_reduce", 2_000_000, cluster)
    times = [step_time(slow._replace(overlaps=overlaps), beside, cluster).exposed for overlaps in (False, True)]
    assert times[0] - times[1] == pytest.approx(reduction)


def test_a_slow_loader_is_waited_for() -> None:
    """A step is no shorter than its pairs take to load; steps without a loader wait for nothing."""
    slow = replace(COMPUTE, loading_rate=100.0)
    loaded, alone = (step_time(work(64, 4)._replace(rows=rows), slow, Cluster(1, 4, NETWORK)) for rows in (1000, 0))
    assert loaded.total == pytest.approx(10) and loaded.loading == pytest.approx(10 - alone.total)
    assert alone.loading == 0 and alone.total < 10


def test_a_machine_survives_json() -> None:
    compute = Compute(0.02, math.inf, 1e10, 5e8, math.inf, 1e4, skew=0.1, cores=2)
    assert from_json(json.loads(json.dumps(to_json(compute, NETWORK)))) == (compute, NETWORK)


def test_machines_by_name(tmp_path: Path) -> None:
    assert {"infiniband", "slingshot", "ethernet"} <= set(network_names())
    machine = find_machine("h100", "slingshot")
    assert machine.memory_gb == 80 and not machine.measured
    busy = work(64, 16)._replace(rows=64)
    slow, slow_towers, slow_network, fast = machine.cases(
        lambda rates: step_time(busy, rates.compute, Cluster(2, 8, rates.network))
    )
    assert slow.total > 3 * fast.total and fast.loading == 0
    assert slow_network.exposed > slow.exposed and slow_towers.computation > slow_network.computation
    (path := tmp_path / "machine.json").write_text(json.dumps(to_json(COMPUTE, NETWORK)))
    measured = find_machine(str(path), "slingshot")
    assert measured.slow == measured.fast == (COMPUTE, NETWORK) and measured.measured
    with pytest.raises(UserError, match=r"z80 is none of the machines .*choose one of h100"):
        find_machine("z80", "slingshot")
    with pytest.raises(UserError, match=r"no machine file nowhere/machine\.json"):
        find_machine("nowhere/machine.json", "slingshot")
