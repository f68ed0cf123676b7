"""The copy of a run in a remote store: complete there or invisible, pruned, fetched again, and kept through faults."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from small_checkpoints import DATA, FACTS, PlainEngine, keeper, trained

from neuclip_ds.checkpoint import remote_run
from neuclip_ds.checkpoint.checkpoints import Best
from neuclip_ds.checkpoint.integrity import META, verify
from neuclip_ds.checkpoint.remote_process import RemoteCall
from neuclip_ds.checkpoint.remote_run import RemoteRun
from neuclip_ds.data.failures import FailureKind, TransferFailure

STEPS = ["step_000000001", "step_000000002", "step_000000003"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a local S3 server, configured for this process and those that it starts."""
    boto3, moto_server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
        boto3.client("s3").create_bucket(Bucket="checkpoints")
        yield "s3://checkpoints"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}/run"
    return f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/store/run"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    keeping = keeper(folder, keep=3)
    for step in (1, 2, 3):
        keeping.save(step, PlainEngine(float(step)), trained(), FACTS, DATA)
    keeping.keep_best(Best(1, "recall", 0.5))
    return folder


@pytest.fixture
def run(checkpoints: Path, tmp_path: Path) -> Path:
    """A run's folder with three checkpoints, of which the first is the best."""
    folder = shutil.copytree(checkpoints, tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 3}\n')
    return folder


def listed(url: str) -> set[str]:
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    return {path.removeprefix(f"{root}/") for path in fs.find(root)}


def test_what_was_copied_can_be_fetched(url: str, run: Path, tmp_path: Path) -> None:
    remote = RemoteRun(url)
    assert remote.open() == ([], None)
    remote.copy(str(run), [STEPS[2], STEPS[0]], None)
    assert remote.open() == ([STEPS[0], STEPS[2]], STEPS[0])
    local = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert listed(url) == {path for path in local if STEPS[1] not in path}

    fetched = tmp_path / "fetched"
    (fetched / "checkpoints").mkdir(parents=True)
    for rank in range(2):  # each takes a share
        remote.fetch_checkpoint(STEPS[2], str(fetched / "checkpoints" / STEPS[2]), rank, 2)
    verify(fetched / "checkpoints" / STEPS[2])
    remote.fetch_records(str(fetched))
    assert (fetched / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert (fetched / "checkpoints/best.json").read_bytes() == (run / "checkpoints/best.json").read_bytes()


def test_old_ones_and_interrupted_ones_are_deleted_but_not_the_best(url: str, run: Path) -> None:
    remote = RemoteRun(url)
    remote.copy(str(run), STEPS, None)
    remote._write(f"{remote._checkpoints}/step_000000009/engine/half", b"half")
    assert remote.complete() == STEPS
    remote.copy(str(run), [STEPS[2]], 1)
    assert remote.complete() == [STEPS[0], STEPS[2]]
    assert not any(path.startswith(("checkpoints/step_000000009", f"checkpoints/{STEPS[1]}")) for path in listed(url))


def test_the_same_step_of_a_later_start_takes_the_place_of_the_first(url: str, run: Path) -> None:
    remote, checkpoint = RemoteRun(url), run / "checkpoints" / STEPS[2]
    remote.copy(str(run), [STEPS[2]], None)
    (checkpoint / "config.yaml").unlink()
    (checkpoint / META).write_text((checkpoint / META).read_text().replace("abc", "def"))
    remote.copy(str(run), [STEPS[2]], None)
    assert f"checkpoints/{STEPS[2]}/config.yaml" not in listed(url)
    assert b"def" in (remote._read(f"{remote._checkpoints}/{STEPS[2]}/{META}") or b"")


class _Failing:
    """A file system whose writes fail so many times."""

    def __init__(self, fs: Any, failures: int, error: Exception) -> None:
        self._fs, self.left, self._error = fs, failures, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def put_file(self, *arguments: Any) -> None:
        if self.left:
            self.left -= 1
            raise self._error
        self._fs.put_file(*arguments)


def test_failures_are_retried_and_leave_nothing_visible(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_run, "_BACKOFF", 0.0)
    remote = RemoteRun(f"file://{tmp_path}/store/run")
    fs = remote._fs
    remote._fs = _Failing(fs, 1000, ConnectionError("reset"))
    with pytest.raises(TransferFailure, match=r"ConnectionError: reset \(5 attempts\)") as failed:
        remote.copy(str(run), [STEPS[2]], None)
    assert failed.value.kind is FailureKind.OUTAGE
    assert remote.complete() == []
    remote._fs = _Failing(fs, 4, ConnectionError("reset"))
    remote.copy(str(run), [STEPS[2]], None)
    assert remote.complete() == [STEPS[2]]


def test_a_damaged_copy_is_told_from_an_outage(run: Path, tmp_path: Path) -> None:
    remote = RemoteRun(f"file://{tmp_path}/store/run")
    remote.copy(str(run), [STEPS[2]], None)
    damaged = tmp_path / "store/run/checkpoints" / STEPS[2] / "config.yaml"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    with pytest.raises(TransferFailure, match="its checksum differs") as failed:
        remote.fetch_checkpoint(STEPS[2], str(tmp_path / "fetched"), 0, 1)
    assert failed.value.kind is FailureKind.DAMAGED


def test_nothing_is_written_outside_the_checkpoint(tmp_path: Path) -> None:
    remote = RemoteRun(f"memory://{uuid.uuid4().hex}/run")
    for name in (META, "../../outside"):
        remote._fs.pipe_file(f"{remote._checkpoints}/{STEPS[0]}/{name}", b"{}")
    with pytest.raises(TransferFailure, match="outside the checkpoint"):
        remote.fetch_checkpoint(STEPS[0], str(tmp_path / "a" / "b"), 0, 1)
    assert not (tmp_path / "outside").exists()


@pytest.mark.slow
def test_a_copy_that_is_killed_at_any_moment_is_invisible_and_repeated(run: Path, tmp_path: Path) -> None:
    store, moments, seen = tmp_path / "store", random.Random(20261122), set()
    url, began = f"file://{store}/run", time.monotonic()
    RemoteRun(url).copy(str(run), STEPS, None)
    took = time.monotonic() - began
    for _ in range(15):
        shutil.rmtree(store)
        call = RemoteCall(url, "copy", str(run), STEPS, None)

        def kill_while_it_writes(call: RemoteCall = call) -> None:
            while not store.exists():
                time.sleep(0.001)
            time.sleep(took * moments.uniform(0, 1))
            call.kill()

        killer = threading.Thread(target=kill_while_it_writes)
        killer.start()
        with suppress(TransferFailure):
            call.result()
        killer.join()
        complete = RemoteRun(url).complete()
        for name in complete:
            verify(store / "run" / "checkpoints" / name)
        seen.add(len(complete))
    assert len(seen) > 1, "the kills came at different moments"
    RemoteRun(url).copy(str(run), STEPS, None)
    assert RemoteRun(url).complete() == STEPS


def test_another_process_does_it(bucket: str, run: Path) -> None:
    url = f"{bucket}/{uuid.uuid4().hex}"
    assert RemoteCall(url, "copy", str(run), [STEPS[2]], None).result() is None
    assert RemoteCall(url, "open").result() == [[STEPS[2]], None]
    with pytest.raises(TransferFailure, match="Protocol not known: nowhere") as failed:
        RemoteCall("nowhere://store", "open").result()
    assert failed.value.kind is FailureKind.SETUP
    call = RemoteCall(url, "open")
    call.kill()
    with pytest.raises(TransferFailure, match="was killed"):
        call.result()


def test_a_missing_bucket_is_not_created(bucket: str) -> None:
    with pytest.raises(TransferFailure):
        RemoteRun("s3://chekpoints/run").open()
    fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    assert fs.ls("") == ["checkpoints"]


def test_best_is_that_of_the_store(run: Path, tmp_path: Path) -> None:
    remote = RemoteRun(f"file://{tmp_path}/store/run")
    remote.copy(str(run), [STEPS[2]], None)
    assert json.loads((run / "checkpoints/best.json").read_text())["step"] == 1
    assert remote.open() == ([STEPS[2]], None), "the best one was not copied"
