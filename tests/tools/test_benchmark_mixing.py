"""The measures of tools/benchmark_mixing.py on orders whose mixing is known, and its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from benchmark_mixing import ORDERS, Mixing, Samples, measure
from small_runs import call

SAMPLES = Samples(6_400, 100)  # in 64 shards
BATCH = 64


def test_an_order_that_is_not_shuffled() -> None:
    found = measure(np.arange(6_400).reshape(100, BATCH), SAMPLES, nodes=1)
    within = 6_400 - 64  # pairs of neighbours
    crossing = sum(at % 100 != 0 for at in range(BATCH, 6_400, BATCH))  # of them in different batches
    assert found.neighbours == within
    assert found.together == pytest.approx(1 - crossing / within)
    assert found.distance == pytest.approx(crossing / within)
    assert found.shards == np.mean(
        [len({at // 100 for at in range(first, first + 64)}) for first in range(0, 6_400, 64)]
    )
    assert found.kept == 2


def test_an_order_that_takes_one_sample_of_each_shard() -> None:
    batches = np.arange(6_400).reshape(64, 100).T
    found = measure(batches, SAMPLES, nodes=4)
    assert found == Mixing(shards=64, together=0, neighbours=6_400 - 64, distance=1, kept=16)


def test_samples_of_no_full_batch_do_not_count() -> None:
    found = measure(np.arange(6_400).reshape(64, 100).T[:50], SAMPLES, nodes=1)
    assert found.neighbours == 64 * 49


def test_worse_is_fewer_shards_nearer_neighbours_or_more_of_them_together() -> None:
    peer = Mixing(shards=1000, together=3e-4, neighbours=10**7, distance=900, kept=100)
    assert peer.is_no_worse_than(peer._replace(kept=1))
    error = (2 * 3e-4 / 10**7) ** 0.5
    for change in ({"shards": 995.0}, {"distance": 895.0}, {"together": 3e-4 + 2 * error}):
        assert peer._replace(**change).is_no_worse_than(peer), change
    for change in ({"shards": 980.0}, {"distance": 880.0}, {"together": 3e-4 + 4 * error}):
        assert not peer._replace(**change).is_no_worse_than(peer), change


@pytest.mark.parametrize("name", ["ours", "uniform", "py1e", "py1br"])
@pytest.mark.parametrize("nodes", [1, 8])
def test_every_order_reads_each_sample_once(name: str, nodes: int) -> None:
    if name.startswith("py"):
        pytest.importorskip("streaming")
    batches = ORDERS[name](SAMPLES, BATCH, nodes, 0)
    assert batches.shape == (100, BATCH)
    assert np.array_equal(np.sort(batches, axis=None), np.arange(6_400))


def test_the_table_and_the_figures_behind_it(tmp_path: Path) -> None:
    options = ["--samples=6400", "--per-shard=100", "--batch=64", "--nodes", "1", "8", "--out=found.json"]
    done = call("tools/benchmark_mixing.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^\| 64 \| (\d) \| (\w+) \|.*\| (-|yes|\*\*no\*\*) \|$", done.stdout, re.MULTILINE)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(str(row["nodes"]), row["order"]) for row in rows] == [row[:2] for row in shown]
    assert [row for row in shown if row[1] == "ours"] == [("1", "ours", "-"), ("8", "ours", "-")]
    assert "uniform" in {row["order"] for row in rows}
    refused = call("tools/benchmark_mixing.py", "--batch=60", "--nodes=8", folder=tmp_path)
    assert refused.returncode == 2 and "choose another --batch" in refused.stderr
