"""A run's copy in a remote store is either complete or invisible, can be restored, and survives faults of the store."""

import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from small_checkpoints import DATA, FACTS, PlainEngine, keeper, trained
from small_runs import contents

from neuclip_ds.checkpoint.checkpoints import Best
from neuclip_ds.checkpoint.integrity import META, verify
from neuclip_ds.checkpoint.remote import RemoteRun, start_push
from neuclip_ds.config import RunConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training.hooks import remote as module
from neuclip_ds.training.hooks.remote import CopyRun, restore

STEPS = ["step_000000001", "step_000000002", "step_000000003"]
NAME = "run [1] * of?{a,b}"  # contains glob wildcards


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Yield a bucket of a local S3 server, which this process and its children use by default."""
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


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}"
    return f"file://{tmp_path}/store"


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
    """Return a run's folder with three checkpoints, the first of which is the best."""
    folder = shutil.copytree(checkpoints, tmp_path / "here" / NAME)
    (folder / "metrics.jsonl").write_text('{"step": 3}\n')
    return folder


def config(folder: Path, remote: str) -> RunConfig:
    return RunConfig(output_dir=folder, remote=remote)


def test_a_run_is_restored_elsewhere_as_it_was_last_copied(store: str, run: Path, tmp_path: Path) -> None:
    """A copy has the newest and best checkpoints and the files next to them, even if the run's name has wildcards.

    A checkpoint that a later launch saves at the same step replaces the first one.
    """
    remote = RemoteRun(f"{store}/{NAME}")
    assert remote.names() == []
    remote.push(run, [STEPS[2]])
    shutil.rmtree(run / "checkpoints" / STEPS[2])
    keeper(run, keep=3).save(3, PlainEngine(4.0), trained(), FACTS, DATA)
    remote.push(run, [STEPS[2], STEPS[0]])
    assert remote.names() == [STEPS[0], STEPS[2]]
    restored = tmp_path / "there" / NAME
    restore(config(restored.parent, store), restored)
    assert contents(restored) == {name: data for name, data in contents(run).items() if STEPS[1] not in name}
    restore(config(restored.parent, store), restored)  # finds nothing newer


def test_the_newest_intact_checkpoint_of_a_damaged_copy_is_restored(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    RemoteRun(f"file://{store}/{NAME}").push(run, STEPS)
    copies = store / NAME / "checkpoints"
    (copies / STEPS[2] / "config.yaml").write_bytes((copies / STEPS[2] / "config.yaml").read_bytes()[::-1])
    (copies / STEPS[1] / META).write_text('{"files": {"../../../outside": [0, 0]}}')
    (copies / "best.json").write_text("{")
    restored = tmp_path / "there" / NAME
    restore(config(restored.parent, str(store)), restored)
    assert [path.name for path in (restored / "checkpoints").iterdir()] == [STEPS[0]]
    assert not list(tmp_path.rglob("outside"))


def test_a_store_that_cannot_be_used_is_refused(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for store in (f"{tmp_path}/file/store", "nowhere://store", "s3://misspelled/runs"):
        with pytest.raises(UserError, match=r"run\.remote: the copy in .* cannot be read or written"):
            restore(config(tmp_path / "runs", store), tmp_path / "runs" / "run")
    fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    assert fs.ls("") == [bucket.removeprefix("s3://")], "no bucket is created"


def test_a_copy_that_is_killed_at_any_moment_is_invisible_and_repeated(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    url = f"file://{store}/run"
    for files in (1, 8, 20):  # number of copied files after which the copy is killed
        shutil.rmtree(store, ignore_errors=True)
        push = start_push(url, run, STEPS)
        while push.poll() is None and sum(path.is_file() for path in store.rglob("*")) < files:
            time.sleep(0.0005)
        push.kill()
        push.communicate()
        for name in RemoteRun(url).names():
            verify(store / "run" / "checkpoints" / name)
    push = start_push(url, run, STEPS)
    assert push.communicate()[0] == "" and push.returncode == 0
    assert RemoteRun(url).names() == STEPS


def loop_of(run: Path, store: Path, messages: list[str]) -> Any:
    """Return a fake loop with the attributes that the hook uses; its events are added to `messages`."""
    return SimpleNamespace(
        folder=run,
        done=3,
        checkpoints=SimpleNamespace(changes=1, in_use=None),
        events=SimpleNamespace(add=lambda step, kind, message: messages.append(f"{kind}: {message}")),
        context=SimpleNamespace(
            communicator=Communicator(), config=SimpleNamespace(run=config(run.parent, str(store)))
        ),
    )


def step_until(hook: CopyRun, loop: Any, reached: Any) -> None:
    deadline = time.monotonic() + 30
    while not reached() and time.monotonic() < deadline:
        hook.after_step(loop, None)  # type: ignore[arg-type]
        time.sleep(0.01)


def test_training_continues_while_the_store_fails_or_stalls(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    (store / NAME / "checkpoints").mkdir(parents=True)
    (store / NAME / "checkpoints" / STEPS[2]).touch()  # a file where a folder should be
    messages: list[str] = []
    loop = loop_of(run, store, messages)
    hook = CopyRun(str(store))
    hook.start(loop)
    hook.after_step(loop, None)  # type: ignore[arg-type]
    assert loop.checkpoints.in_use(run / "checkpoints" / STEPS[2]), "what is copied is not deleted"
    assert not loop.checkpoints.in_use(run / "checkpoints" / STEPS[1])
    step_until(hook, loop, lambda: messages)
    assert messages[0].startswith(f"copy_failed: {STEPS[2]} and {STEPS[0]} could not") and "NotADirec" in messages[0]

    def sleep(*arguments: Any) -> Any:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE)

    loop.checkpoints.changes = 2
    with monkeypatch.context() as patch:
        patch.setattr(module, "start_push", sleep)
        patch.setattr(module, "_COPY_TIMEOUT", 0.2)
        step_until(hook, loop, lambda: len(messages) == 2)
    assert "took more than" in messages[1]
    assert RemoteRun(f"file://{store}/{NAME}").names() == []

    (store / NAME / "checkpoints" / STEPS[2]).unlink()
    loop.checkpoints.changes = 3
    hook.close(loop, None)
    assert RemoteRun(f"file://{store}/{NAME}").names() == [STEPS[0], STEPS[2]]
    (run / "complete.json").write_text(json.dumps({"step": 3}))
    hook.after_run(loop)
    assert (store / NAME / "complete.json").exists() and len(messages) == 2
