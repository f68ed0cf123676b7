"""What the processes of a node know together about the storage of its shards, and how they spare it.

They fetch at most `transfers` shards ahead at a time, and as many that a batch waits for. The limit halves when the
storage throttles, falls to 1 when it fails, and rises by about 1 per round of successes. While the storage refuses or
fails every shard, all of them wait, and one attempt after each backoff finds out when that ends. The folder holds

    state            what is known, as JSON; locked while it is read or written
    due-N, ahead-N   locked by the process that has one of the turns

Locks are the kernel's (flock), so a killed process frees its turn.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from neuclip_ds.data.failures import FailureKind, TransferFailure
from neuclip_ds.data.fetch import FetchPolicy, Request, Verdict, backoff_of
from neuclip_ds.data.locks import open_lock, open_regular, try_lock
from neuclip_ds.distributed.stop_signals import deferring
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

log = logging.getLogger(__name__)

_POLL = 0.1  # seconds
_REMIND = 600.0  # seconds between two messages about the same outage
_STALE = 180.0  # seconds, and two timeouts, after which an attempt that was due has ended
_RATES = 64  # recent transfers whose rates are kept
_SLOWEST = 0.05  # share of them that is slower than a transfer to which a second one is added
_FEWEST = 16  # rates without which none is added
_HEDGE_AFTER = 1.0  # seconds; the start of a transfer's program varies by about as much
_STARTED = time.time()  # of this program, which worker processes are told

_NODE_WIDE = {  # what is the matter, and the fix
    FailureKind.CREDENTIALS: ("the storage refuses access", "renew the credentials"),
    FailureKind.THROTTLED: ("the storage throttles this node or is slow", "lower data.transfers if this is often"),
    FailureKind.OUTAGE: ("the storage fails or cannot be reached", "check it and the network"),
    FailureKind.DISK: ("shards cannot be written to the cache", "make room on its disk"),
}
_ASIDE = (FailureKind.CREDENTIALS, FailureKind.OUTAGE)  # may be the fault of one shard, if others arrive
_OFTEN = {FailureKind.THROTTLED: 3}  # attempts before a wait is worth a message


@dataclass
class Outage:
    """What the node waits for."""

    kind: FailureKind
    reason: str
    since: float  # Unix time
    until: float  # Unix time of the next attempt
    attempts: int = 0

    def describe(self) -> str:
        """Return what is the matter, and the fix."""
        matter, fix = _NODE_WIDE[self.kind]
        return f"{matter} ({self.reason}): {fix}"


@dataclass
class _State:
    """What the node's processes share."""

    most: int  # `transfers` of the program that wrote this
    limit: float  # transfers at a time, of shards ahead and of shards that are due
    lowered: float = 0.0  # Unix time at which the limit was last lowered
    succeeded: float = 0.0  # Unix time at which the latest successful attempt had begun
    rates: list[int] = field(default_factory=list)  # bytes per second of recent transfers
    outage: Outage | None = None
    told: dict[str, float] = field(default_factory=dict)  # Unix time of the last message about it, to readers and ahead


class Storage:
    """The storage of a node's shards, as its processes see it together.

    Args:
        folder: existing folder of the state, private to this node.
        transfers: shards that are fetched at a time, as `data.transfers`.
        max_outage: seconds that a batch waits for the storage, as `data.max_outage`.
        timeout: seconds without a byte after which an attempt fails.
    """

    def __init__(self, folder: Path, transfers: int, max_outage: float, timeout: float) -> None:
        self.folder, self.transfers, self.max_outage = folder, transfers, max_outage
        self._stale = _STALE + 2 * timeout
        self.started = _STARTED

    def read(self) -> _State:
        """Return what is known now."""
        with self._locked(fcntl.LOCK_SH) as file:
            return self._parse(file)

    @contextmanager
    def update(self) -> Iterator[_State]:
        """Yield what is known, which the block may change."""
        with self._locked(fcntl.LOCK_EX) as file:
            state = self._parse(file)
            yield state
            # in place, which needs no room on the disk
            data = json.dumps(asdict(state)).encode()
            os.pwrite(file.fileno(), data, 0)
            os.ftruncate(file.fileno(), len(data))

    def take_turn(self, role: str, limit: float) -> ExitStack | None:
        """Return what ends a turn, one of as many as the limit allows, or None if all are taken."""
        for number in range(int(limit)):
            turn = ExitStack()
            file = turn.enter_context(open_lock(self.folder / f"{role}-{number}"))
            if try_lock(file.fileno()):
                turn.callback(fcntl.flock, file, fcntl.LOCK_UN)  # as in `_locked`
                return turn
            turn.close()
        return None

    @contextmanager
    def _locked(self, how: int) -> Iterator[IO[bytes]]:
        with os.fdopen(open_regular(self.folder / "state", os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
            fcntl.flock(file, how)
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough when a forked process has the file open too

    def _parse(self, file: IO[bytes]) -> _State:
        """Return the stored state, without what an earlier program has left unfinished; a new one if there is none."""
        try:
            stored = json.loads(file.read())
            outage = stored.pop("outage")
            state = _State(**stored)
            state.outage = outage and Outage(**{**outage, "kind": FailureKind(outage["kind"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            state = _State(self.transfers, self.transfers)
        if state.most != self.transfers:
            state.most, state.limit = self.transfers, self.transfers
        if state.outage is not None and abs(time.time() - state.outage.until) > self._stale:
            state.outage = None
        return state


class NodePolicy(FetchPolicy):
    """The policy of one fetch on a node: waits are shared with all other fetches.

    Args:
        storage: of the node.
        due: whether a batch waits for the shard. If not, there is no limit to waiting.

    Attributes:
        failing_since: Unix time of the shard's first failure, also in earlier fetches; 0 if there was none since the
            last success.
        wanted: whether a batch has begun to wait for the shard meanwhile, which then takes its turn as one that is due.
    """

    def __init__(self, storage: Storage, due: bool) -> None:
        self.due, self.failing_since = due, 0.0
        self.wanted: Callable[[], bool] = lambda: False
        self._storage, self._since, self._alone = storage, time.time(), 0

    @property
    def _role(self) -> str:
        return "due" if self.due or self.wanted() else "ahead"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and for the next attempt where the node waits for the storage."""
        while True:
            self.check()
            state = self._storage.read()
            if not _paused(state) and (turn := self._storage.take_turn(self._role, state.limit)) is not None:
                with turn:
                    if not _paused(self._storage.read()):  # another attempt may have failed meanwhile
                        yield
                        return
            time.sleep(_POLL)

    def check(self) -> None:
        """Log what the node waits for, once and then every ten minutes.

        Raises:
            UserError: a batch has waited for `max_outage` seconds, or the storage has refused access to all shards
                since the program started.
            Interrupted: a signal has arrived meanwhile.
        """
        state = self._storage.read()
        if (outage := state.outage) is None:
            return
        with deferring(False):
            pass
        now = time.time()
        role = self._role
        if outage.attempts >= _OFTEN.get(outage.kind, 1) and now - state.told.get(role, 0) > _REMIND:
            self._tell(role, outage, now)
        if not self.due:
            return
        if outage.kind is FailureKind.CREDENTIALS and state.succeeded < self._storage.started:
            raise UserError(f"No shard can be fetched: {outage.describe()}, and start again.")
        if now - max(self._since, outage.since) >= self._storage.max_outage:
            raise UserError(
                f"No shard was fetched for data.max_outage={self._storage.max_outage:g} s: {outage.describe()}, and "
                "start again."
            )

    def succeed(self, began: float, size: int) -> None:
        now = time.time()
        with self._storage.update() as state:
            state.succeeded = max(state.succeeded, began)
            state.rates = [*state.rates, round(size / max(now - began, 1e-3))][-_RATES:]
            if began >= state.lowered:
                state.limit = min(state.most, state.limit + 1 / state.limit)
            outage = state.outage
            if outage is None or began < outage.since:
                return
            state.outage, told, state.told = None, state.told, {}
        if told:
            log.warning("shards arrive again, after %.0f s", now - outage.since)

    def judge(self, failure: TransferFailure, began: float, request: Request, attempt: int) -> Verdict:
        """Return what follows a failed attempt.

        Damaged shards are retried. All else is waited for with the whole node, throttling at once and the rest after
        the retries. Where other shards arrive that began after this one first failed, it alone is retried.
        """
        last, kind, now = attempt > request.retries, failure.kind, time.time()
        if kind is FailureKind.DAMAGED:
            return "give up" if last else "retry"
        self.failing_since = self.failing_since or now
        with self._storage.update() as state:
            if kind in _ASIDE and state.succeeded > self.failing_since:
                self._alone += 1
                return "give up" if self._alone > request.retries else "retry"
            if not last and kind is not FailureKind.THROTTLED and state.outage is None:
                return "retry"
            if began < state.lowered:  # of the same event
                return "wait"
            state.limit = max(1.0, state.limit / 2) if kind is FailureKind.THROTTLED else 1.0
            state.lowered = now
            if state.outage is None:
                state.told = {}
            outage = state.outage or Outage(kind, "", now, now)
            attempts = outage.attempts + 1
            until = now + backoff_of(request.url, attempts, request.backoff)
            state.outage = Outage(kind, redact(str(failure)), outage.since, until, attempts)
        return "wait"

    def hedge_after(self, size: int | None) -> float:
        """Return the time that all but the slowest of recent transfers would have taken."""
        state = self._storage.read()
        if size is None or len(state.rates) < _FEWEST or state.limit < state.most:
            return math.inf
        return max(_HEDGE_AFTER, size / max(1, sorted(state.rates)[int(_SLOWEST * len(state.rates))]))

    def spare(self) -> AbstractContextManager[object] | None:
        return self._storage.take_turn(self._role, self._storage.read().limit)

    def _tell(self, role: str, outage: Outage, now: float) -> None:
        with self._storage.update() as state:
            if state.outage is None or now - state.told.get(role, 0) <= _REMIND:
                return  # it is over, or another process has told
            state.told[role] = now
        what = "training waits for shards" if role == "due" else "shards cannot be fetched ahead"
        log.warning("%s: %s; next attempt in %.0f s", what, outage.describe(), max(outage.until - now, 0))


def _paused(state: _State) -> bool:
    """Whether no attempt may start yet."""
    return state.outage is not None and time.time() < state.outage.until
