"""Test storage that throttles, refuses access or fails: readers wait, and no sample is bad or out of order."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from forks import fork
from servers import Files, files_server
from small_runs import TRAIN, call, environment, start, train, training
from tars import load_training, manifest_of, write_pairs
from test_loaders import what_was_trained

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher, shards_ahead
from neuclip_ds.distributed.stop_signals import STOP_SIGNALS, deferring, raising_interrupted
from neuclip_ds.errors import Interrupted, UserError

SHARDS, SAMPLES = 4, 4


@pytest.fixture
def http() -> Iterator[Files]:
    with files_server() as server:
        yield server


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), [SAMPLES] * SHARDS)
    return manifest_of(folder)


@pytest.fixture
def remote(local: Manifest, http: Files) -> Manifest:
    """Return a manifest of the same shards on the HTTP server."""
    for shard in local.shards:
        http.files[Path(shard.path).name] = Path(shard.path).read_bytes()
    return Manifest([replace(shard, path=http.url(Path(shard.path).name)) for shard in local.shards])


def cache_in(folder: Path, **options: float) -> ShardCache:
    return ShardCache(folder / "cache", 10**6, **{"timeout": 30, "backoff": 0.1, **options})


def order_of(manifest: Manifest) -> GlobalOrder:
    """Return an order in which each batch is one shard."""
    return GlobalOrder(manifest.starts, manifest.sizes, SAMPLES, 0, Interleave(1, SAMPLES))


def batches(manifest: Manifest, cache: ShardCache | None, workers: int = 1, **options: float) -> Iterator[Batch]:
    loading = LoaderOptions(workers=workers, prefetch=1, cache=cache, **options)
    return load_training(manifest, order_of(manifest), EvalTransform(16), loading, SHARDS)


@contextmanager
def refusing(http: Files, status: int, answers: int) -> Iterator[None]:
    """Answer all requests with an error status until `answers` requests have been refused."""
    before, http.refuses, over = http.refused, status, threading.Event()

    def watch() -> None:
        while http.refused - before < answers and not over.wait(0.01):
            pass
        http.refuses = None

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert http.refused - before >= answers, "the fault was met"


def assert_undisturbed(found: list[Batch], local: Manifest) -> None:
    wanted = list(batches(local, None, workers=0))
    assert all(batch.valid.all() and not batch.bad for batch in found)
    assert torch.equal(torch.cat([batch.index for batch in found]), torch.cat([batch.index for batch in wanted]))
    assert torch.equal(torch.cat([batch.image for batch in found]), torch.cat([batch.image for batch in wanted]))


@pytest.mark.parametrize("status", [403, 503])
def test_an_outage_is_waited_for(
    status: int, http: Files, remote: Manifest, local: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first batch, the server refuses access or throttles for a while, and then recovers."""
    loading = batches(remote, cache_in(tmp_path), workers=0)
    found = [next(loading)]
    with refusing(http, status, answers=3):
        found += list(loading)
    assert_undisturbed(found, local)
    (waits,) = caplog.messages
    assert waits.startswith("waiting for shards: ") and str(status) in waits


def test_a_server_that_throttles_delivers_each_shard_once(
    http: Files, remote: Manifest, local: Manifest, tmp_path: Path
) -> None:
    """The server accepts one request at a time from the prefetcher and two readers, and delays its first response."""
    http.most = 1
    http.gate.clear()

    def release() -> None:
        while not http.refused:
            time.sleep(0.01)
        http.gate.set()

    threading.Thread(target=release, daemon=True).start()
    cache, requests = cache_in(tmp_path), partial(shards_ahead, order_of(remote), 0, 0, [slice(0, SAMPLES)])
    with Prefetcher(cache, requests, remote.shards, begin=0, end=SHARDS, ahead=SHARDS):
        found = list(batches(remote, cache, workers=2))
    assert_undisturbed(found, local)
    assert http.gets.total() == SHARDS


@pytest.mark.parametrize(
    ("status", "message"),
    [(500, r"500.*data.max_outage .*: check the storage"), (403, r"403.*Check the credentials")],
    ids=["outage", "refused access"],
)
def test_waiting_has_a_limit(status: int, message: str, http: Files, remote: Manifest, tmp_path: Path) -> None:
    http.refuses = status
    with pytest.raises(UserError, match=message):
        next(batches(remote, cache_in(tmp_path, max_outage=1 if status == 500 else 60)))
    assert http.refused >= 2 if status == 500 else http.refused == 5


def test_a_missing_package_is_no_bad_sample(local: Manifest, tmp_path: Path) -> None:
    manifest = Manifest([replace(shard, path="oci://bucket/x.tar") for shard in local.shards])
    with pytest.raises(UserError, match="Install ocifs"):
        next(batches(manifest, cache_in(tmp_path)))


@pytest.mark.slow
def test_workers_that_wait_for_the_storage_are_not_replaced(
    http: Files, remote: Manifest, local: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader's timeout is shorter than the outage, and longer than workers take to start on a loaded machine."""
    with refusing(http, 500, answers=4):
        found = list(batches(remote, cache_in(tmp_path, backoff=2), timeout=10))
    assert_undisturbed(found, local)
    assert "replacing" not in caplog.text


def wait_in_vain(manifest: Manifest, folder: Path, workers: int) -> None:
    """Wait for a batch as a training loop does, which defers signals to the end of the step."""
    try:
        with raising_interrupted(), deferring():
            next(batches(manifest, cache_in(folder), workers))
    except Interrupted as error:
        os._exit(error.code)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_a_signal_ends_the_wait(number: int, workers: int, http: Files, remote: Manifest, tmp_path: Path) -> None:
    assert number in STOP_SIGNALS
    http.refuses = 500
    process = fork(wait_in_vain, remote, tmp_path, workers, variables=environment())
    while not cache_in(tmp_path).waits_for_storage():
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == 128 + number


@pytest.mark.slow
def test_a_run_through_an_outage_equals_an_undisturbed_one(http: Files, tmp_path: Path) -> None:
    """The cache has room for only eight of the twelve shards, so some are fetched during the epoch."""
    folder = write_pairs(tmp_path / "local", [8] * 12)
    for path in folder.iterdir():
        http.files[path.name] = path.read_bytes()
    manifest = str(tmp_path / "manifest")
    call("tools/build_manifest.py", manifest, http.url("{00000..00011}.tar"))
    most = 8 * max(map(len, http.files.values())) / 1e9
    options = [
        "--data.shuffle_block_size=8",
        "--data.shard_streams=1",
        "--run.log_every=1",
        "--data.max_bad_fraction=0",
    ]
    cache = [f"--data.cache_dir={tmp_path}/cache", f"--data.cache_gb={most}", "--data.workers=1"]
    (program,) = start(TRAIN, *training(tmp_path / "remote", manifest, 12), *options, *cache)
    metrics = tmp_path / "remote" / "run" / "metrics.jsonl"
    while not metrics.is_file() or '"step"' not in metrics.read_text():
        assert program.running, program.printed()
        time.sleep(0.05)
    with refusing(http, 503, answers=12):
        done = program.wait(240)
    assert done.returncode == 0, done.stderr
    assert "waiting for shards" in done.stderr
    assert not (tmp_path / "remote" / "run" / "bad_samples.jsonl").exists()
    train(tmp_path / "disk", str(folder), 12, *options)
    assert what_was_trained(tmp_path / "remote") == what_was_trained(tmp_path / "disk")
