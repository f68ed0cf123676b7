"""Only one process at a time can train in a run's folder, and folders with unrelated files are refused."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
from forks import fork, kill
from servers import wait_for
from small_runs import demo_shards, environment, train

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.training.run_lock import LOCK, locked


def hold(folder: Path) -> None:
    with locked(folder, Communicator()):
        (folder / "held").touch()
        time.sleep(600)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuclip_ds.training.run_lock._EXIT_TIMEOUT", 0.1)
    monkeypatch.setattr("neuclip_ds.training.run_lock._HEARTBEAT_TIMEOUT", 1.0)


def test_a_second_process_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = fork(hold, folder, variables=environment())
    try:
        wait_for((folder / "held").exists)
        before = (folder / LOCK).read_bytes()
        with pytest.raises(UserError, match=f"in use by process {process.pid} on {os.uname().nodename}"):
            locked(folder, Communicator()).__enter__()
        assert (folder / LOCK).read_bytes() == before
    finally:
        kill(process)
    with locked(folder, Communicator()):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()


def test_a_process_on_another_host_is_known_by_its_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that share a file system might not see each other's locks."""
    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"host": "another", "pid": 7}))
    ended = threading.Event()

    def send_heartbeats() -> None:
        while not ended.wait(0.05):
            os.utime(lock)

    thread = threading.Thread(target=send_heartbeats)
    thread.start()
    try:
        with pytest.raises(UserError, match="in use by process 7 on another"):
            locked(tmp_path, Communicator()).__enter__()
    finally:
        ended.set()
        thread.join()
    monkeypatch.setattr("neuclip_ds.training.run_lock._HEARTBEAT_TIMEOUT", 0.1)
    with locked(tmp_path, Communicator()):
        assert "another" not in lock.read_text(), "without heartbeats, that process is considered dead"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    shards = demo_shards(tmp_path / "data", 20)
    folder = tmp_path / "runs" / "run"
    for name in ("tokenizer/vocab.json", "model/weights.bin", "config.yaml", "metrics.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    refused = train(tmp_path / "runs", shards, 1, code=2)
    assert f"{folder} contains files but is not the folder of a run" in refused.stderr
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 4 and all(path.read_text() == "mine" for path in files)


@pytest.mark.parametrize("checkpoints", ["checkpoints", "recovery/checkpoints"])
def test_a_run_without_its_lock_is_known_by_its_checkpoints_and_not_by_those_of_other_runs(
    checkpoints: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run" / checkpoints / "step_000000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text("{}")
    with locked(tmp_path / "run", Communicator()):
        pass
    with pytest.raises(UserError, match="is not the folder of a run"):
        locked(tmp_path, Communicator()).__enter__()


def test_a_refused_start_leaves_no_folder(tmp_path: Path) -> None:
    def refuse() -> None:
        with locked(tmp_path / "runs" / "new", Communicator()):
            raise UserError("no")

    with pytest.raises(UserError):
        refuse()
    assert not (tmp_path / "runs" / "new").exists()
