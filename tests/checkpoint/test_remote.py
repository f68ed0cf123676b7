"""A run's copy in a remote store is either complete or invisible, can be restored, and survives faults of the store."""

import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from forks import fork
from ranks import run_ranks
from small_checkpoints import DATA, FACTS, PlainEngine, keeper, trained
from small_runs import contents, environment

from neuclip_ds.checkpoint.checkpoints import Best
from neuclip_ds.checkpoint.integrity import META, sealed, verify
from neuclip_ds.checkpoint.remote import RemoteRun, start_push
from neuclip_ds.config import RunConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training import run_lock
from neuclip_ds.training.hooks import remote as module
from neuclip_ds.training.hooks.remote import CopyRun, restore
from neuclip_ds.training.run_lock import LOCK, locked

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
    restore(config(restored.parent, store), Communicator(), restored)
    assert contents(restored) == {name: data for name, data in contents(run).items() if STEPS[1] not in name}
    restore(config(restored.parent, store), Communicator(), restored)  # finds nothing newer


def test_the_newest_intact_checkpoint_of_a_damaged_copy_is_restored(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    RemoteRun(f"file://{store}/{NAME}").push(run, STEPS)
    copies = store / NAME / "checkpoints"
    (copies / STEPS[2] / "config.yaml").write_bytes((copies / STEPS[2] / "config.yaml").read_bytes()[::-1])
    (copies / STEPS[1] / META).write_text('{"files": {"../../../outside": [0, 0]}}')
    (copies / "best.json").write_text("{")
    restored = tmp_path / "there" / NAME
    restore(config(restored.parent, str(store)), Communicator(), restored)
    assert [path.name for path in (restored / "checkpoints").glob("step_*")] == [STEPS[0]]
    assert not list(tmp_path.rglob("outside"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no meta.json": lambda checkpoint: (checkpoint / META).unlink(),
    "a list": lambda checkpoint: (checkpoint / META).write_text("[1]"),
    "no files": lambda checkpoint: (checkpoint / META).write_text(sealed({"step": 3, "files": None})),
    "no JSON": lambda checkpoint: (checkpoint / META).write_bytes(b"\xff{"),
    "a flipped bit": lambda checkpoint: flip(checkpoint / "state" / "00000-of-00001.safetensors"),
    "a lost file": lambda checkpoint: (checkpoint / "state" / "index.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("local", "copied", "newest"),
    [
        pytest.param("3!", "3", 3, id="only the local one is damaged"),
        pytest.param("1 2! 3!", "2 3!", 2, id="the newest is damaged in both places"),
        pytest.param("1 3!", "2", 2, id="the copy has one between two local ones"),
        pytest.param("2 3!", "1 3!", 2, id="the local fallback is newer"),
        pytest.param("1! 2!", "1 3", 3, id="the run continued elsewhere"),
    ],
)
def test_a_run_resumes_from_the_newest_checkpoint_that_is_intact_in_either_place(
    damage: str, local: str, copied: str, newest: int, checkpoints: Path, tmp_path: Path
) -> None:
    """Checkpoints are given by their steps; an exclamation mark means that the checkpoint is damaged."""
    folder = tmp_path / "here" / "run"
    store = tmp_path / "store"
    for place, steps in ((folder, local), (store / "run", copied)):
        for step in steps.split():
            name = STEPS[int(step[0]) - 1]
            shutil.copytree(checkpoints / "checkpoints" / name, place / "checkpoints" / name)
            if step.endswith("!"):
                DAMAGES[damage](place / "checkpoints" / name)
        (place / "metrics.jsonl").write_text(str(place))
    (store / "run" / "log.txt").touch()
    restore(config(folder.parent, str(store)), Communicator(), folder)
    chosen = keeper(folder).newest()
    assert chosen is not None and chosen.name == STEPS[newest - 1]
    is_continued_elsewhere = newest > max(int(step[0]) for step in local.split())
    assert (folder / "metrics.jsonl").read_text() == str(store / "run" if is_continued_elsewhere else folder)
    assert (folder / "log.txt").exists() == (chosen.name not in contents_of_intact(local))


def contents_of_intact(local: str) -> list[str]:
    """Return the names of the undamaged checkpoints among steps such as `1 2!`."""
    return [STEPS[int(step) - 1] for step in local.split() if not step.endswith("!")]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("local", [[], STEPS[:1]])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(
    damage: str, local: list[str], run: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    RemoteRun(f"file://{store}/{NAME}").push(run, STEPS[1:])
    for name in STEPS[1:]:
        DAMAGES[damage](store / NAME / "checkpoints" / name)
    restored = tmp_path / "there" / NAME
    for name in local:
        shutil.copytree(run / "checkpoints" / name, restored / "checkpoints" / name)
        DAMAGES[damage](restored / "checkpoints" / name)
    before = contents(store)
    with pytest.raises(UserError, match=r"No checkpoint of this run is intact, either in .* or in its copy"):
        restore(config(restored.parent, str(store)), Communicator(), restored)
    assert contents(store) == before


def restored_names(communicator: Communicator, store: str, folder: Path) -> str:
    restore(config(folder.parent, store), communicator, folder)
    newest = keeper(folder, communicator=communicator).newest()
    return "" if newest is None else newest.name


def test_all_ranks_restore_the_same_checkpoint(run: Path, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    RemoteRun(f"{store}/{NAME}").push(run, STEPS[1:])
    flip(tmp_path / "store" / NAME / "checkpoints" / STEPS[2] / "config.yaml")
    flip(run / "checkpoints" / STEPS[2] / "config.yaml")
    flip(run / "checkpoints" / STEPS[1] / "config.yaml")
    assert run_ranks(2, restored_names, store, run) == [STEPS[1]] * 2


def test_a_store_with_only_an_interrupted_first_copy_is_no_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / NAME / "checkpoints" / STEPS[0]).mkdir(parents=True)
    (tmp_path / "store" / NAME / "checkpoints" / STEPS[0] / "config.yaml").touch()
    new = tmp_path / "there" / NAME
    restore(config(new.parent, f"file://{tmp_path}/store"), Communicator(), new)
    assert keeper(new).newest() is None


def refused(folder: Path) -> bool:
    try:
        with locked(folder, Communicator()):
            return False
    except UserError:
        return True


def write_refused(folder: Path, answer: Path) -> None:
    run_lock._EXIT_TIMEOUT = 0.1
    answer.write_text(str(refused(folder)))


def test_a_restored_run_keeps_its_lock(run: Path, tmp_path: Path) -> None:
    """A store may also have the lock of another process, which an earlier version of the package copied."""
    store = f"file://{tmp_path}/store"
    with locked(run, Communicator()):
        RemoteRun(f"{store}/{NAME}").push(run, STEPS[2:])
        assert not (tmp_path / "store" / NAME / LOCK).exists()
    (tmp_path / "store" / NAME / LOCK).write_text('{"host": "another", "pid": 7}')
    restored = tmp_path / "there" / NAME
    with locked(restored, Communicator()):
        restore(config(restored.parent, store), Communicator(), restored)
        shutil.copytree(restored, tmp_path / "backup")  # as a hook may do
        assert (restored / "checkpoints" / STEPS[2]).exists()
        process = fork(write_refused, restored, tmp_path / "answer", variables=environment())
        process.join()
        assert (tmp_path / "answer").read_text() == "True"
    assert not refused(restored)


def test_a_store_that_cannot_be_used_is_refused(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for store in (f"{tmp_path}/file/store", "nowhere://store", "s3://misspelled/runs"):
        with pytest.raises(UserError, match=r"run\.remote: the copy in .* cannot be read or written"):
            restore(config(tmp_path / "runs", store), Communicator(), tmp_path / "runs" / "run")
    for store in (tmp_path / "runs", tmp_path / "link"):
        (tmp_path / "runs" / "run").mkdir(parents=True, exist_ok=True)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("runs")
        with pytest.raises(UserError, match=r"run\.remote would put the copy into the run's own folder"):
            restore(config(tmp_path / "runs", str(store)), Communicator(), tmp_path / "runs" / "run")
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
        checkpoints=Mock(changes=1),
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
    (in_use,) = loop.checkpoints.protect.call_args.args
    assert in_use(run / "checkpoints" / STEPS[2]), "what is copied is not deleted"
    assert not in_use(run / "checkpoints" / STEPS[1])
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
