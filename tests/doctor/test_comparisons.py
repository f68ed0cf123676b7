"""What only the findings of all ranks show."""

from __future__ import annotations

from dataclasses import replace

from neuclip_ds.doctor.checks.matmul import BF16
from neuclip_ds.doctor.comparisons import below_data_sheet, differing_nodes, slow_ranks
from neuclip_ds.doctor.finding import Finding, fine


def placed(finding: Finding, where: str, check: str = "matmul") -> Finding:
    return replace(finding, where=where, check=check)


def test_a_node_with_other_versions() -> None:
    same = [placed(fine(facts={"numpy": "2.4", "torch": "2.15"}), f"node{n}", "versions") for n in (1, 2)]
    (one,) = differing_nodes([*same, placed(fine(facts={"numpy": "1.26", "torch": "2.15"}), "node3", "versions")])
    assert (one.level, one.where, one.check) == ("warning", "node3", "versions")
    assert "numpy: 1.26, elsewhere 2.4" in one.message and one.fix
    assert list(differing_nodes(same)) == []


def test_a_rank_that_is_slow() -> None:
    rates = {"rank 0 on a": 400.0, "rank 1 on a": 410.0, "rank 2 on b": 250.0}
    (one,) = slow_ranks([placed(fine(figures={BF16: rate}), where) for where, rate in rates.items()])
    assert one.where == "rank 2 on b" and "250.0, where the median is 400.0" in one.message


def test_a_gpu_below_its_data_sheet() -> None:
    gpu = placed(fine(facts={"GPUs": "8 x NVIDIA H100 80GB HBM3, 80 GiB"}), "a", "devices")
    for rate, count in ((300.0, 1), (700.0, 0)):
        found = list(below_data_sheet([gpu, placed(fine(figures={BF16: rate}), "rank 0 on a")]))
        assert len(found) == count
    assert list(below_data_sheet([placed(fine(figures={BF16: 0.1}), "cpu")])) == []
