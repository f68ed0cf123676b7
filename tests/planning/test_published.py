"""Published times are read as printed, held against the model's range, and give back the rates behind them."""

from __future__ import annotations

import math

import pytest

from neuclip_ds.planning.cost_model import Call, Cluster, Compute, Network, Range, Work, step_time
from neuclip_ds.planning.machines import find_machine
from neuclip_ds.planning.published import Comparison, Parts, PublishedStep, compare, implied_rates, read_published
from neuclip_ds.recipe import parse_for


def test_the_published_rows_are_read_and_add_up() -> None:
    found = read_published()
    by_name = {(step.source, step.setting, step.method, step.nodes): step for step in found}
    assert len(by_name) == len(found) == 4 + 8 * 2 * 4
    assert by_name["NeuCLIP, Table 5", "ViT-B/16", "neuclip", 1].total == pytest.approx(0.94441)
    last = by_name["FastCLIP, Table 22", "ViT-B/16 on cluster 2", "openclip_reference", 8]
    assert last.parts == pytest.approx((0.43366, 0.36986, 0.12379)) and last.assumed == ("machine", "rows")
    for recipe in {step.recipe for step in found}:
        assert parse_for(None, [recipe])
    for machine, network in {(step.machine, step.network) for step in found}:
        assert find_machine(machine, network)
    for step in found:
        if step.parts:
            computation, communication, exposed = step.parts
            assert exposed < communication and 0.02 < step.total - computation - exposed < 0.15, step


def test_the_range_is_the_models_own() -> None:
    """A published step's range is what the cost model has at both ends of its machine."""
    (one,) = compare([step for step in read_published() if step.source == "AmorLIP, Table 2"])
    machine = find_machine("h100", "infiniband")
    cluster = Cluster(1, 1, machine.fast.network)
    slow, fast = (step_time(one.work, end.compute, cluster).total for end in (machine.slow, machine.fast))
    assert one.total == Range(fast, slow) and fast < one.published.total < slow
    assert one.work.rows == 1024 and one.exposed == Range(0, 0)
    (rates,) = implied_rates([one])
    assert rates.utilisation == pytest.approx([one.work.tower_flops / 0.84448 / 989e12] * 2) and rates.fitted is None


def test_rates_are_found_again() -> None:
    """Steps that a known machine would show give its rates back, and no error."""
    compute = Compute(0.05, 1e13, math.inf, math.inf, math.inf, math.inf, overlaps_engine=True)
    network = Network(0, 0, inner_bandwidth=2e10, bandwidth=2e9)
    found = []
    for nodes in (1, 2, 4):
        call = Call("gradient reduce", "all_reduce", 10**9)
        work = Work(2e12, 0.7, 1e9, 1e9, 1e8, 0, [call], overlaps=True, rows=100)
        time = step_time(work, compute, Cluster(nodes, 4, network))
        parts = Parts(time.computation - 0.05, time.communication, time.exposed)
        step = PublishedStep(
            "a paper", "", "openclip", "demo", "a100", "slingshot", 4, nodes, 100, (), time.total, parts
        )
        found.append(Comparison(step, work, Range(0, 0), Range(0, 0), tower_peak=1e14))
    (rates,) = implied_rates(found)
    assert rates.fitted is not None
    known = {"utilisation": 0.1, "overhead": 0.05, "inner_bandwidth": 2e10, "bandwidth": 2e9}
    for name, value in known.items():
        assert getattr(rates.fitted, name) == pytest.approx((value, value)), name
    assert rates.fitted.error == pytest.approx((0, 0), abs=1e-9)
    assert rates.pairs_per_second.high == pytest.approx(100 / found[0].published.total)
