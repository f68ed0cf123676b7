"""The loaders that tools/benchmark_streaming.py compares read whole and resumed epochs from disk and from S3."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import benchmark_streaming
import pytest
from benchmark_streaming import Counters, Setting, Storage, measure, prepare
from benchmarking.object_store import object_store
from tars import write_pairs

N = 48
BATCH = 8
HALF = 3  # batches
OPTIONS = {"batch": BATCH, "workers": 2, "prefetch": 2, "image_size": 16, "decoder": "pil"}


@pytest.fixture(scope="module")
def storages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Storage]]:
    folder = tmp_path_factory.mktemp("store")
    pytest.importorskip("s3fs")
    data = write_pairs(folder.parent / "data", [24] * 2)
    with object_store(folder, 0, 0) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        prepared = prepare(Setting(data=str(data)), folder, store, with_mds=benchmark_streaming.has_mosaic())
        yield {storage.name: storage for storage in prepared}


@pytest.mark.parametrize("name", ["ours", "webdataset", "mosaic"])
@pytest.mark.parametrize("location", ["disk", pytest.param("S3", marks=pytest.mark.slow)])
def test_a_contender_reads_whole_and_resumed_epochs(storages: dict[str, Storage], location: str, name: str) -> None:
    if name == "mosaic":
        pytest.importorskip("streaming")
    if name == "webdataset" and location == "S3" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    setting = Setting(**OPTIONS)
    contender = getattr(benchmark_streaming, name)
    whole = measure(contender, setting, storages[location], 0, None)
    assert (whole.first_samples, whole.samples) == (BATCH, N)
    resumed = measure(contender, setting, storages[location], HALF, None)
    assert (resumed.first_samples, resumed.samples) == (BATCH, N - HALF * BATCH)
    if location == "S3":
        shards = sum(Path(path).stat().st_size for path in storages["disk"].tars)
        fetched = whole.fetched.bytes if name == "mosaic" else shards
        assert 0 < whole.first_fetched.bytes <= whole.fetched.bytes == fetched
    else:
        assert whole.fetched == Counters(0, 0)
