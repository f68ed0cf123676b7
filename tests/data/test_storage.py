"""What a node's processes know together: how many transfers at a time, what all wait for, when a second one starts."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from neuclip_ds.data.failures import FailureKind, TransferFailure
from neuclip_ds.data.fetch import Request
from neuclip_ds.data.storage import NodePolicy, Outage, Storage

REQUEST = Request("s3://bucket/x.tar", None, timeout=1, retries=1)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path, transfers=8, max_outage=60, timeout=1)


def fail(storage: Storage, kind: FailureKind, attempt: int = 1, began: float | None = None) -> str:
    began = time.time() if began is None else began
    return NodePolicy(storage, due=False).judge(TransferFailure("a test", kind), began, REQUEST, attempt)


def test_throttling_halves_the_limit_once_for_the_transfers_under_way(storage: Storage) -> None:
    before = time.time()
    assert fail(storage, FailureKind.THROTTLED) == "wait"
    assert storage.read().limit == 4
    for _ in range(3):
        assert fail(storage, FailureKind.THROTTLED, began=before) == "wait"
    assert storage.read().limit == 4
    for limit in (2, 1, 1):
        fail(storage, FailureKind.THROTTLED)
        assert storage.read().limit == limit


def test_successes_raise_the_limit_by_one_a_round(storage: Storage) -> None:
    fail(storage, FailureKind.THROTTLED)
    policy = NodePolicy(storage, due=True)
    policy.succeed(storage.read().lowered - 1, 100)
    assert storage.read().limit == 4, "it began before"
    for _ in range(4):
        policy.succeed(time.time(), 100)
    assert 4.8 < storage.read().limit <= 5
    for _ in range(100):
        policy.succeed(time.time(), 100)
    assert storage.read().limit == 8


@pytest.mark.parametrize("kind", [FailureKind.OUTAGE, FailureKind.CREDENTIALS, FailureKind.DISK])
def test_other_failures_become_the_nodes_after_the_retries(storage: Storage, kind: FailureKind) -> None:
    assert fail(storage, kind, attempt=1) == "retry"
    assert storage.read().outage is None
    assert fail(storage, kind, attempt=2) == "wait"
    state = storage.read()
    assert (state.limit, state.outage and state.outage.kind) == (1, kind)
    assert fail(storage, kind, attempt=1) == "wait", "which all others join at once"
    outage = storage.read().outage
    assert outage is not None and outage.attempts == 2


def test_damage_is_never_the_nodes(storage: Storage) -> None:
    assert [fail(storage, FailureKind.DAMAGED, attempt) for attempt in (1, 2)] == ["retry", "give up"]
    assert storage.read().outage is None


def test_a_transfer_that_began_before_the_outage_does_not_end_it(storage: Storage) -> None:
    began = time.time() - 5
    fail(storage, FailureKind.CREDENTIALS, attempt=2)
    NodePolicy(storage, due=True).succeed(began, 100)
    assert storage.read().outage is not None
    NodePolicy(storage, due=True).succeed(time.time(), 100)
    assert storage.read().outage is None


def test_the_limit_follows_the_option(storage: Storage, tmp_path: Path) -> None:
    fail(storage, FailureKind.THROTTLED)
    assert Storage(tmp_path, transfers=32, max_outage=60, timeout=1).read().limit == 32


def test_an_outage_of_a_program_that_has_ended_is_forgotten(storage: Storage) -> None:
    with storage.update() as state:
        state.outage = Outage(FailureKind.OUTAGE, "a test", time.time() - 900, time.time() - 600, 5)
    assert storage.read().outage is None


def test_a_second_transfer_starts_when_most_would_have_ended(storage: Storage) -> None:
    policy = NodePolicy(storage, due=True)
    assert policy.hedge_after(40_000) == math.inf, "too few are known"
    with storage.update() as state:
        state.rates = [1000, 10] + [2000] * 30
    assert policy.hedge_after(40_000) == 40
    assert policy.hedge_after(1) == 1, "programs do not start in no time"
    fail(storage, FailureKind.THROTTLED)
    assert policy.hedge_after(40_000) == math.inf, "nor more requests where fewer are wanted"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"outage": {}}', b'{"outage": null, "no": 1}', b"\xff"])
def test_a_damaged_state_is_replaced(content: bytes, storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(content)
    with storage.update() as state:
        assert (state.limit, state.outage) == (8, None)
        state.limit = 3
    assert storage.read().limit == 3
