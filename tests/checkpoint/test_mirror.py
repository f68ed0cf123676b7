"""Copies of checkpoints in a thread: which are copied, which must stay meanwhile, failures, and the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from neuclip_ds.checkpoint import mirror as module
from neuclip_ds.checkpoint.mirror import Mirror
from neuclip_ds.data.failures import FailureKind, TransferFailure


class Call:
    """An operation that lasts until it is released, and fails if told to."""

    made: list[Call]
    failure: str | None = None

    def __init__(self, url: str, operation: str, folder: str, names: list[str], keep: int | None) -> None:
        self.names, self._ended, self.killed = list(names), threading.Event(), False
        self.made.append(self)

    def release(self) -> None:
        self._ended.set()

    def result(self) -> Any:
        self._ended.wait(10)
        if self.killed or self.failure:
            raise TransferFailure(self.failure or "killed", FailureKind.OUTAGE)

    def kill(self) -> None:
        self.killed = True
        self.release()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    made: list[Call] = []
    monkeypatch.setattr(Call, "made", made, raising=False)
    monkeypatch.setattr(module, "RemoteCall", Call)
    return made


def wait_for(calls: list[Call], number: int) -> Call:
    deadline = time.monotonic() + 10
    while len(calls) < number and time.monotonic() < deadline:
        time.sleep(0.005)
    return calls[number - 1]


def test_one_that_waits_gives_way_to_a_newer_one(calls: list[Call]) -> None:
    mirror, paths = Mirror(Path("run"), "s3://bucket/run", None), [Path(f"step_{n}") for n in range(3)]
    mirror.copy([paths[0]])
    first = wait_for(calls, 1)
    for path in paths[1:]:
        mirror.copy([path])
    assert [mirror.uses(path) for path in paths] == [True, False, True]
    assert not mirror.wait(0.01)
    first.release()
    wait_for(calls, 2).release()
    assert mirror.wait(10)
    assert [call.names for call in calls] == [["step_0"], ["step_2"]]
    assert not any(mirror.uses(path) for path in paths)
    mirror.close()


def test_failures_are_reported_without_secrets_and_the_next_is_copied(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(Path("run"), "ftp://me:password@host/run", None)
    monkeypatch.setattr(Call, "failure", "PermissionError: denied")
    mirror.copy([Path("step_1")])
    wait_for(calls, 1).release()
    assert mirror.wait(10)
    assert mirror.take_failures() == [
        "step_1 was not copied to ftp://***@host/run: PermissionError: denied.",
    ]
    monkeypatch.setattr(Call, "failure", None)
    mirror.copy([Path("step_2")])
    wait_for(calls, 2).release()
    assert mirror.wait(10) and mirror.take_failures() == []
    mirror.close()


def test_the_end_stops_what_is_in_progress(calls: list[Call]) -> None:
    mirror = Mirror(Path("run"), "s3://bucket/run", None)
    mirror.copy([Path("step_1")])
    call = wait_for(calls, 1)
    mirror.close()
    assert call.killed and mirror.take_failures() == []
