"""Storage that throttles, refuses, stalls or cuts: the node waits, and no sample is bad or out of order."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from forks import fork
from servers import Files, files_server
from small_runs import call, environment, start, train, training
from tars import tokenize, write_pairs

from neuclip_ds.data.build import build_manifest
from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.failures import FailureKind
from neuclip_ds.data.fetch import FetchError
from neuclip_ds.data.interleave import Interleave
from neuclip_ds.data.loader import LoaderOptions, train_loader
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import Prefetcher
from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.storage import Outage, Storage
from neuclip_ds.data.transforms import EvalTransform
from neuclip_ds.distributed.stop_signals import STOP_SIGNALS, deferring, raising_interrupted
from neuclip_ds.errors import Interrupted, UserError
from neuclip_ds.reporting.sample_log import read_samples

SHARDS, SAMPLES = 4, 4


@pytest.fixture
def http() -> Iterator[Files]:
    with files_server() as server:
        yield server


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), [SAMPLES] * SHARDS)
    return build_manifest(resolve_shards(str(folder)), processes=1)


@pytest.fixture
def remote(local: Manifest, http: Files) -> Manifest:
    """The same shards behind the server."""
    for shard in local.shards:
        http.files[Path(shard.path).name] = Path(shard.path).read_bytes()
    return Manifest([shard._replace(path=http.url(Path(shard.path).name)) for shard in local.shards])


def cache_in(folder: Path, **options: float) -> ShardCache:
    return ShardCache(folder / "cache", 10**6, **{"timeout": 30, "retries": 1, "backoff": 0.1, **options})


def storage_of(folder: Path) -> Storage:
    """Return what the processes share that use the cache of `cache_in`."""
    return Storage(folder / "cache" / "storage", 8, 3600, 30)


def order_of(manifest: Manifest) -> GlobalOrder:
    """A batch is a shard."""
    return GlobalOrder(manifest.starts, manifest.sizes, SAMPLES, 0, Interleave(1, SAMPLES))


def batches(manifest: Manifest, cache: ShardCache | None, workers: int = 1, **options: float) -> Iterator[Batch]:
    loading = LoaderOptions(workers, prefetch=1, restarts=0, cache=cache, **options)
    return train_loader(manifest, order_of(manifest), EvalTransform(16), tokenize, steps=SHARDS, options=loading)


def fetch_all(cache: ShardCache, manifest: Manifest, numbers: Sequence[int], due: bool = False) -> None:
    for number in numbers:
        shard = manifest.shards[number]
        cache.path(shard.path, shard.bytes, due=due)


@contextmanager
def refusing(http: Files, status: int, answers: int) -> Iterator[None]:
    """Answer all requests with a status, until so many were."""
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


@pytest.mark.parametrize("status", [403, 500, 503])
def test_an_outage_is_waited_for(
    status: int, http: Files, remote: Manifest, local: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first batch the credentials expire, the server fails, or it throttles; then all is well again."""
    loading = batches(remote, cache_in(tmp_path), workers=0)
    found = [next(loading)]
    with refusing(http, status, answers=3):
        found += list(loading)
    assert_undisturbed(found, local)
    waits, ends = caplog.messages
    reason = {403: "refuses access", 500: "fails or cannot be reached", 503: "throttles this node or is slow"}[status]
    assert waits.startswith(f"training waits for shards: the storage {reason} (")
    assert str(status) in waits
    assert ends.startswith("shards arrive again, after ")


def test_transfers_that_fail_now_and_then(http: Files, remote: Manifest, local: Manifest, tmp_path: Path) -> None:
    http.faults = {"00000.tar": ["stall"], "00001.tar": ["cut"], "00002.tar": ["short"], "00003.tar": [500]}
    assert_undisturbed(list(batches(remote, cache_in(tmp_path, timeout=2))), local)
    assert set(http.gets.values()) == {2}
    assert storage_of(tmp_path).read().lowered == 0, "no other transfer has waited"


def test_throttling_lowers_the_number_of_transfers(
    http: Files, remote: Manifest, local: Manifest, tmp_path: Path
) -> None:
    """The server takes one request at a time from the prefetching process and two readers, and holds the first."""
    http.most = 1
    http.gate.clear()

    def release() -> None:
        while not http.refused:
            time.sleep(0.01)
        http.gate.set()

    threading.Thread(target=release, daemon=True).start()
    cache, requests = cache_in(tmp_path), partial(order_of(remote).shards_ahead, 0, 0, [slice(0, SAMPLES)])
    with Prefetcher(cache, requests, remote.shards, begin=0, end=SHARDS, ahead=SHARDS):
        found = list(batches(remote, cache, workers=2))
    assert_undisturbed(found, local)
    assert storage_of(tmp_path).read().limit < 8
    assert http.gets.total() == SHARDS, "each arrived once"


def test_waiting_has_a_limit(http: Files, remote: Manifest, tmp_path: Path) -> None:
    http.refuses = 500
    waiting = batches(remote, cache_in(tmp_path, max_outage=1))
    message = r"^No shard was fetched for data.max_outage=1 s: the storage fails or cannot be .* \(.*500.*\): check it"
    with pytest.raises(UserError, match=message):
        next(waiting)
    assert http.refused >= 3


def test_credentials_that_never_worked_end_the_run_soon(http: Files, remote: Manifest, tmp_path: Path) -> None:
    http.refuses = 403
    message = r"^No shard can be fetched: the storage refuses access \(.*403.*\): renew the credentials, and start"
    with pytest.raises(UserError, match=message):
        next(batches(remote, cache_in(tmp_path)))
    assert http.refused == 2, "one retry"


def test_a_shard_that_alone_is_refused_is_bad(http: Files, remote: Manifest, tmp_path: Path) -> None:
    """S3 answers 403 for an object that does not exist to those who may not list the bucket."""
    http.faults["00002.tar"] = [403] * 99
    cache, errors = cache_in(tmp_path), list[FetchError]()
    fetch_all(cache, remote, [0])

    def read() -> None:
        with pytest.raises(FetchError, match="403") as caught:
            fetch_all(cache, remote, [2], due=True)
        errors.append(caught.value)

    reader = threading.Thread(target=read)
    reader.start()
    while storage_of(tmp_path).read().outage is None:
        assert reader.is_alive()
        time.sleep(0.02)
    fetch_all(cache, remote, [1, 3])
    reader.join()
    assert [error.kind for error in errors] == [FailureKind.CREDENTIALS]
    assert storage_of(tmp_path).read().outage is None
    for lock in (tmp_path / "cache" / "locks").iterdir():
        os.utime(lock, (time.time() - 61,) * 2)
    before = http.gets["00002.tar"]
    with pytest.raises(FetchError, match=r"403.*\(2 attempts\)"):
        fetch_all(cache, remote, [2], due=True)
    assert http.gets["00002.tar"] - before == 2, "it is known, so nobody waits for it again"


def test_a_missing_package_is_no_bad_sample(local: Manifest, tmp_path: Path) -> None:
    manifest = Manifest([shard._replace(path="oci://bucket/x.tar") for shard in local.shards])
    with pytest.raises(UserError, match=r"Install ocifs.*fix this machine or the address"):
        next(batches(manifest, cache_in(tmp_path)))


def test_a_second_transfer_overtakes_one_that_stalls(http: Files, remote: Manifest, tmp_path: Path) -> None:
    cache, shard = cache_in(tmp_path, timeout=600), remote.shards[0]
    with storage_of(tmp_path).update() as state:
        state.rates = [shard.bytes] * 16  # a second each
    http.faults["00000.tar"] = ["stall"]
    assert cache.path(shard.path, shard.bytes).read_bytes() == http.files["00000.tar"]
    assert http.gets["00000.tar"] == 2
    assert not list((tmp_path / "cache" / "shards").glob(".*")), "the other's file is removed"


def test_workers_that_wait_for_the_storage_are_not_replaced(local: Manifest, tmp_path: Path) -> None:
    """The time-out is far shorter than the outage; after it, a transfer that hangs is one again."""
    cache, storage, over = cache_in(tmp_path), storage_of(tmp_path), threading.Event()
    hanging = Manifest([shard._replace(path="pipe:sleep 4321") for shard in local.shards])
    with storage.update() as state:
        state.outage = Outage(FailureKind.OUTAGE, "a test", time.time(), time.time() + 60, 1)

    def end() -> None:
        time.sleep(2)
        over.set()
        with storage.update() as state:
            state.outage = None

    threading.Thread(target=end).start()
    with pytest.raises(UserError, match=r"Timed out after 0.4 s"):
        next(batches(hanging, cache, timeout=0.4))
    assert over.is_set()


def wait_in_vain(manifest: Manifest, folder: Path, workers: int) -> None:
    """Wait for a batch as a training loop does, which notes signals for the end of the step."""
    try:
        with raising_interrupted(), deferring():
            next(batches(manifest, cache_in(folder, retries=0), workers))
    except Interrupted as error:
        os._exit(error.code)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(number: int, workers: int, http: Files, remote: Manifest, tmp_path: Path) -> None:
    assert number in STOP_SIGNALS
    http.refuses = 500
    process = fork(wait_in_vain, remote, tmp_path, workers, variables=environment())
    state = tmp_path / "cache" / "storage" / "state"
    while not state.is_file() or storage_of(tmp_path).read().outage is None:
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == 128 + number


def test_a_shard_that_a_batch_waits_for_does_not_queue_with_those_ahead(
    http: Files, remote: Manifest, tmp_path: Path
) -> None:
    """One transfer is allowed, and one that is ahead has it."""
    cache = cache_in(tmp_path, transfers=1)
    ahead = storage_of(tmp_path).take_turn("ahead", limit=1)
    assert ahead is not None
    fetching = threading.Thread(target=fetch_all, args=(cache, remote, [1]))
    fetching.start()
    while not list((tmp_path / "cache" / "reserved").iterdir()):
        assert fetching.is_alive()
        time.sleep(0.01)
    with ahead:
        fetch_all(cache, remote, [1], due=True)
    fetching.join()
    assert http.gets == {"00001.tar": 1}


def hold_a_turn(manifest: Manifest, folder: Path) -> None:
    fetch_all(cache_in(folder, transfers=1), manifest, [0])


def test_a_killed_process_frees_its_turn(http: Files, remote: Manifest, tmp_path: Path) -> None:
    http.gate.clear()
    process = fork(hold_a_turn, remote, tmp_path, variables=environment())
    while not http.gets:
        assert process.is_alive()
        time.sleep(0.02)
    assert storage_of(tmp_path).take_turn("ahead", limit=1) is None
    process.kill()
    process.join()
    http.gate.set()
    fetch_all(cache_in(tmp_path, transfers=1), remote, [1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_through_expired_credentials_equals_an_undisturbed_one(workers: int, http: Files, tmp_path: Path) -> None:
    """The cache holds eight shards of twelve, so the epoch fetches some; the refusal outlasts a fetch's retries."""
    folder = write_pairs(tmp_path / "local", [8] * 12)
    for path in folder.iterdir():
        http.files[path.name] = path.read_bytes()
    manifest = str(tmp_path / "manifest")
    assert call("tools/build_manifest.py", manifest, http.url("{00000..00011}.tar")).returncode == 0
    most = 8 * max(map(len, http.files.values())) / 1e9
    options = ["--data.shuffle_block=8", "--data.shard_streams=1", "--run.log_every=1", "--data.max_bad_fraction=0"]
    cache = [f"--data.cache_dir={tmp_path}/cache", f"--data.cache_gb={most}", f"--data.workers={workers}"]
    (program,) = start("train.py", *training(tmp_path / "remote", manifest, 12), *options, *cache)
    metrics = tmp_path / "remote" / "run" / "metrics.jsonl"
    while not metrics.is_file() or '"step"' not in metrics.read_text():
        assert program.running, program.printed()
        time.sleep(0.05)
    with refusing(http, 403, answers=12):
        done = program.wait(240)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the storage refuses access") in (1, 2), "ahead, and then for a batch"
    assert "shards arrive again" in done.stderr
    assert not (tmp_path / "remote" / "run" / "bad_samples.jsonl").exists()
    assert train(tmp_path / "disk", str(folder), 12, *options).returncode == 0
    found, wanted = (list(read_samples(tmp_path / name / "run" / "samples")) for name in ("remote", "disk"))
    assert found == wanted
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()]
        for name in ("remote", "disk")
    ]
    assert losses[0] == losses[1]
