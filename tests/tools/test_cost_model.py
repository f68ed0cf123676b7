"""The cost model recovers a known machine's rates, finds machines by name, and gives ranges for published times."""

import json
from pathlib import Path

import pytest
from cost_model import (
    Observation,
    Range,
    Rates,
    compare_published,
    find_machine,
    fit,
    from_json,
    published_tables,
    to_json,
)
from small_runs import SMALL, call
from step_costs import Cluster, collective_seconds, step_time
from test_step_costs import COMPUTE, NETWORK, work

from neuclip_ds.errors import UserError


def observed(rows: int, ranks: int, stage_3: int = 0) -> Observation:
    cluster, done = Cluster(1, ranks, NETWORK), work(rows, ranks, stage_3)
    time, slow = step_time(done, COMPUTE, cluster), COMPUTE.slowdown(ranks)
    transfers = [(call, slow * collective_seconds(call.op, call.size, cluster)) for call in done.calls]
    return Observation(done, ranks, time.total, transfers)


def test_a_known_machine_is_found_again() -> None:
    cases = [(rows, ranks, 0) for rows in (16, 64, 256) for ranks in (1, 2, 4)] + [(64, 1, 50), (64, 2, 50)]
    for wanted, fitted in zip((COMPUTE, NETWORK), fit([observed(*case) for case in cases], cores=2), strict=True):
        for name in wanted.__dataclass_fields__:
            assert getattr(fitted, name) == pytest.approx(getattr(wanted, name), rel=1e-3), name


def test_machines_by_name(tmp_path: Path) -> None:
    machine, busy = find_machine("h100", "slingshot"), work(64, 16)._replace(rows=64)
    slow, slow_towers, slow_network, fast = machine.cases(
        lambda rates: step_time(busy, rates.compute, Cluster(2, 8, rates.network))
    )
    assert slow.total > 3 * fast.total and fast.loading == 0
    assert slow_network.exposed > slow.exposed and slow_towers.computation > slow_network.computation
    path, rates = tmp_path / "machine.json", Rates(COMPUTE, NETWORK)
    path.write_text(json.dumps(to_json(rates)))
    measured = find_machine(str(path), "slingshot")
    assert measured.slow == measured.fast == from_json(json.loads(path.read_text())) == rates
    with pytest.raises(UserError, match=r"z80 is not among the machines .*choose one of h100"):
        find_machine("z80", "slingshot")
    with pytest.raises(UserError, match=r"nowhere/machine\.json does not describe a machine"):
        find_machine("nowhere/machine.json", "slingshot")


@pytest.mark.slow
def test_published_times_are_in_the_range_except_one() -> None:
    found = list(compare_published())
    assert len(found) == 4 + 8 * 2 * 4
    (one,) = (one for one in found if (one.source, one.method) == ("AmorLIP, Table 2", "openclip_reference"))
    assert one.published == {"total": pytest.approx(0.84448)} and one.model["exposed"] == Range(0, 0)
    outside = [one for one in found if not one.model["total"][0] <= one.published["total"] <= one.model["total"][1]]
    assert [round(1e3 * one.published["total"]) for one in outside] == [529], "NeuCLIP's with RN50"
    totals, exposed = published_tables(found)
    assert len(totals.rows) == 4 + 8 * 2 and len(exposed.rows) == 8 * 2


@pytest.mark.slow
def test_scale() -> None:
    where = ["--nodes", "1", "4", "--gpus", "2", "--rows", "8", "--machine", "a100", "--networks", "ethernet"]
    methods = ["--methods", "openclip_reference", "openclip", "neuclip"]
    done = call("tools/cost_model.py", "scale", "demo", *methods, *where, *SMALL)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    assert [row[:3] for row in rows[2:]] == [
        [method, nodes, batch] for method in methods[1:] for nodes, batch in (("1", "16"), ("4", "64"))
    ]
    assert " - " in rows[2][3], "a range, as nobody has measured the machine"
