"""The contenders of tools/benchmark_streaming.py read whole and resumed epochs, from disk and from S3."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import benchmark_streaming
import pytest
from benchmark_streaming import COLUMNS, Counters, Run, Setting, Storage, Turn, line, measure, medians, prepare
from benchmarking.object_store import object_store
from tars import write_pairs

N, BATCH, HALF = 48, 8, 3
OPTIONS = {"batch": BATCH, "workers": 2, "prefetch": 2, "image_size": 16, "decoder": "pil"}


@pytest.fixture(scope="module")
def storages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Storage]]:
    folder = tmp_path_factory.mktemp("store")
    pytest.importorskip("s3fs")
    data = write_pairs(folder.parent / "data", [24] * 2)
    with object_store(folder, 0, 0) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        found = prepare(Setting(data=str(data)), folder, store, with_mds=benchmark_streaming.has_mosaic())
        yield {storage.name: storage for storage in found}


@pytest.mark.parametrize("name", ["ours", "webdataset", "mosaic"])
@pytest.mark.parametrize("where", ["disk", pytest.param("S3", marks=pytest.mark.slow)])
def test_a_contender_reads_what_it_should(storages: dict[str, Storage], where: str, name: str) -> None:
    if name == "mosaic":
        pytest.importorskip("streaming")
    if name == "webdataset" and where == "S3" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    setting, contender = Setting(**OPTIONS), getattr(benchmark_streaming, name)
    whole = measure(contender, setting, storages[where], 0, None)
    assert (whole.first_samples, whole.samples) == (BATCH, N)
    rest = measure(contender, setting, storages[where], HALF, None)
    assert (rest.first_samples, rest.samples) == (BATCH, N - HALF * BATCH)
    if where == "S3":
        shards = sum(Path(path).stat().st_size for path in storages["disk"].tars)
        fetched = whole.fetched.bytes if name == "mosaic" else shards
        assert 0 < whole.first_fetched.bytes <= whole.fetched.bytes == fetched
    else:
        assert whole.fetched == Counters(0, 0)


def test_figures_are_medians_of_turns_and_ratios_of_one_turn(storages: dict[str, Storage]) -> None:
    def turn(rate: float, fetched: int) -> Turn:
        whole = Run(0.5, 8, Counters(1, 100), 40 / rate, N, Counters(4, fetched))
        return Turn(whole, whole._replace(first_seconds=0.25))

    mine, theirs = [turn(100, 960), turn(10, 960), turn(40, 960)], [turn(50, 480), turn(20, 480), turn(10, 4800)]
    figures = medians(theirs, mine, bytes_used=10)
    assert set(figures) == {name for name, *_ in COLUMNS}
    assert figures["samples_per_second"] == pytest.approx(20)
    assert figures["ours_over_it"] == pytest.approx(2), "of 2, 0.5 and 4"
    assert (figures["first_batch_seconds"], figures["resumed_seconds"]) == (0.5, 0.25)
    assert figures["fetched_over_used"] == 1
    assert line(storages["S3"], "it", figures) == "| S3 | it | 20 | 2.00 | 0.50 | 0.25 | 0.0 | 1.00 | 4 |"
    assert line(storages["disk"], "it", figures) == "| disk | it | 20 | 2.00 | 0.50 | 0.25 | - | - | - |"


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    data = write_pairs(tmp_path / "data", [32] * 2)
    options = [str(data), "--batch=8", "--image-size=16", "--repeats=1", "--latency-ms=1", "--out=found.json"]
    program = Path(__file__).parents[2] / "tools/benchmark_streaming.py"  # a real __main__, which its processes import
    done = subprocess.run([sys.executable, str(program), *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "instead of" not in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    rows = [(row["storage"], row["contender"]) for row in found["rows"]]
    assert {("disk", "ours"), ("disk", "webdataset"), ("S3", "ours"), ("S3", "webdataset")} <= set(rows)
    assert all(f"| {storage} | {name} |" in done.stdout for storage, name in rows)
    assert all(row["fetched_over_used"] > 1 for row in found["rows"] if row["storage"] == "S3")
