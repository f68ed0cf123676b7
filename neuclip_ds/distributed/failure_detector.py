"""Failure detector: when a rank fails, all ranks exit under any launcher, and the reason is logged.

When a rank dies, the others hang in a collective: NCCL does not notice, and under `--no_ssh` or pdsh, nothing
informs the other nodes. Each rank therefore keeps an idle TCP connection to the previous rank. The kernel closes the
connection when the previous rank dies or its node does not answer for 20 s, even if Python is busy. The first failure
is stored in torch's store, which all ranks poll twice a second. Rank 0, which may serve the store, exits last.

The log also names hung ranks. A rank that stays at the same line of code for 10 minutes publishes how many collectives
it has begun. Ranks that have begun fewer collectives than others, or have published nothing, keep the others waiting.
"""

import json
import logging
import multiprocessing
import os
import select
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import Interrupted, TrainingDiverged, UserError

log = logging.getLogger(__name__)

_PERIOD = 0.5  # seconds
_WINDOW = 1.0  # seconds that a failed rank waits before it reports: its error may result from another rank's death
_SILENCE = 30.0  # seconds after which a store that does not answer is considered lost
_LONGEST_START = 300.0  # seconds within which the ranks must connect their process groups
_PATIENCE = 600.0  # seconds after which a stuck rank is reported
_SPREAD = 60.0  # seconds within which all ranks that wait for the same rank are stuck, too
_NOT_CONNECTED = (
    "the ranks have not connected to each other by NCCL and gloo in 5 minutes. Set NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME to the network interface that all nodes share (ip addr lists them), under deepspeed --hostfile "
    "in .deepspeed_env; NCCL_DEBUG=INFO prints what NCCL tries."
)
_PACKAGE = f"{Path(__file__).parents[1]}/"
_DIED = "it was killed and reported no error (out of memory, a signal, or a lost node)"


class Failure(NamedTuple):
    """The reason why a rank ended early."""

    rank: int
    host: str
    text: str
    code: int = 1
    is_message: bool = False  # a message for the user, without a traceback


class FailureDetector:
    """End all ranks when the `with` block fails on any rank.

    The exit code is 2 for a `UserError`, 128 + the signal's number for `Interrupted`, and otherwise 1. Rank 0 reports
    `UserError`, `Interrupted` or `TrainingDiverged` in one line. For any other exception, the rank that failed first
    logs the traceback, and local rank 0 of each node logs one line.

    Args:
        environment: rank and world size of this process; all ranks (at least two) must enter the block.
        store: a dedicated connection to the store that rank 0 or torchrun serves.
        address: address at which the other nodes reach this machine.

    Attributes:
        communicator: the caller must set it within 5 minutes, after the ranks have connected their process groups.

    Raises:
        UserError: the previous rank cannot be reached.
    """

    communicator: Communicator | None = None

    def __init__(self, environment: RankEnvironment, store: dist.Store, address: str) -> None:
        self._rank, self._local_rank, self._world_size = environment
        self._store, self._host = store, socket.gethostname()
        self._error: BaseException | None = None  # raised on this rank
        self._failed_at = 0.0
        self._before_ended = self._leaving = False
        self._silence = 0  # periods since the store last answered
        self._wake, self._left = threading.Event(), threading.Event()
        self._began = self._since = time.monotonic()
        self._place: list[object] = []  # where the main thread has been since `_since`
        self._standing = self._named = False  # whether `_place` is published, and whether the awaited ranks are logged
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._held = socket.create_server(("", 0), family=family)  # never accepts: the kernel completes connections
        os.register_at_fork(after_in_child=self._held.close)  # a loader process must not keep the socket open
        store.set(f"rank/{self._rank}", json.dumps([self._host, address, self._held.getsockname()[1]]))
        self._before = (self._rank - 1) % self._world_size
        self._hosts = {rank: json.loads(store.get(f"rank/{rank}"))[0] for rank in (0, self._before)}
        self._connection = _connect(*json.loads(store.get(f"rank/{self._before}")))

    def __enter__(self) -> "FailureDetector":
        for work in (self._watch_store, self._watch_connection):
            threading.Thread(target=work, name="failure detector", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._failed_at, self._error = time.monotonic(), error
        while error is not None:  # until `_watch_store` ends all ranks
            time.sleep(1)
        self._leaving = True
        self._wake.set()
        self._left.wait()
        self._connection.close()
        self._held.close()

    def _find_failure(self) -> Failure | None:
        """Return the failure of this rank or of the previous rank, or None; called repeatedly."""
        if self._before_ended and not self._store.check([f"left/{self._before}"]):
            return Failure(self._before, self._hosts[self._before], _DIED)
        error = self._error
        if error is None and self.communicator is None and time.monotonic() > self._began + _LONGEST_START:
            return Failure(self._rank, self._host, _NOT_CONNECTED, 2, True)
        if error is None or time.monotonic() < self._failed_at + _WINDOW:
            return None
        is_message = isinstance(error, UserError | TrainingDiverged | Interrupted)
        text = str(error) if is_message else f"{type(error).__name__}: {error}"
        code = error.code if isinstance(error, Interrupted) else 2 if isinstance(error, UserError) else 1
        return Failure(self._rank, self._host, text[:2000], code, is_message)

    def _watch_store(self) -> None:
        """Report a failure of the previous rank or of this rank; end the process once any rank has failed."""
        wait = 0.0
        try:
            while not self._store.check(["error"]):
                self._silence = 0
                if found := self._find_failure():
                    self._store.compare_set("error", "", json.dumps(found))  # unless another rank was first
                elif self._leaving:
                    self._store.set(f"left/{self._rank}", "")
                    # the store closes when rank 0 ends, so rank 0 leaves last
                    if self._rank or self._store.check([f"left/{rank}" for rank in range(self._world_size)]):
                        self._left.set()
                        return
                elif self.communicator is not None and dist.is_initialized():  # otherwise only rank 0 is working
                    self._watch_progress(self.communicator)
                self._wake.wait(0.05 if self._leaving else _PERIOD)
                self._wake.clear()
            failure = Failure(*json.loads(self._store.get("error")))
            # launchers stop all ranks if one exits, so rank 0 reports first; it exits last, so that all read `error`
            wait = 2 * _PERIOD if self._rank else 3 * _PERIOD
        except dist.DistError:
            failure = Failure(0, self._hosts[0], _DIED)
        self._end(failure, wait)

    def _watch_connection(self) -> None:
        """Record that the previous rank has ended; end this process if the store has not responded for 30 s."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not self._left.is_set():
            if self._before_ended:
                time.sleep(_PERIOD)
            elif poll.poll(1000 * _PERIOD):
                self._before_ended = True
                self._wake.set()
            self._silence += 1  # counted in this thread, which also stops while the process is paused
            if self._silence * _PERIOD > _SILENCE:
                self._end(Failure(0, self._hosts[0], f"it has not answered for {_SILENCE:.0f} s"))

    def _watch_progress(self, communicator: Communicator) -> None:
        """If this rank is stuck, publish where; the lowest stuck rank also logs which ranks keep the others waiting."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        calls = [f"{of.f_code.co_filename}:{line} in {of.f_code.co_name}" for of, line in traceback.walk_stack(frame)]
        still, key = time.monotonic() - self._since, f"standing/{self._rank}"
        if [communicator.collectives_started, *calls] != self._place:
            self._place, self._since = [communicator.collectives_started, *calls], time.monotonic()
            if self._standing:
                self._store.set(key, "null")
            self._standing = self._named = False
        elif still > _PATIENCE and not self._standing:
            ours = (call.removeprefix(_PACKAGE) for call in calls if call.startswith(_PACKAGE))
            self._store.set(key, json.dumps([communicator.collectives_started, next(ours, calls[0])]))
            self._standing = True
        elif still > _PATIENCE + _SPREAD and not self._named:
            self._named = True
            self._name_awaited()

    def _name_awaited(self) -> None:
        """Log which ranks are behind the others, unless a stuck rank with a lower number does so."""
        if any(self._standing_place(rank) for rank in range(self._rank)):
            return
        places = {rank: self._standing_place(rank) for rank in range(self._world_size)}
        furthest = max(place[0] for place in places.values() if place)
        behind = [rank for rank, place in places.items() if place is None or place[0] < furthest]
        named = []
        for rank in (behind or [*places])[:8]:
            place, host = places[rank], json.loads(self._store.get(f"rank/{rank}"))[0]
            named.append(f"rank {rank} on {host}, which {f'is at {place[1]}' if place else 'is busy or stopped'}")
        log.warning(
            "nothing has moved for %.0f s: %s %s%s; `py-spy dump --pid PID` there shows more",
            _PATIENCE + _SPREAD,
            "the ranks wait for" if behind else "no rank is behind the others; check",
            ", ".join(named),
            f" and {len(behind) - 8} more" if len(behind) > 8 else "",
        )

    def _standing_place(self, rank: int) -> tuple[int, str] | None:
        """Return how many collectives `rank` has begun and where it is stuck, or None if it is not stuck."""
        found = self._store.check([f"standing/{rank}"]) and json.loads(self._store.get(f"standing/{rank}"))
        return found or None

    def _end(self, failure: Failure, wait: float = 0.0) -> NoReturn:
        """Report the failure and end the process; runs in a background thread because the main thread may be stuck."""
        rank, host, text, code, is_message = failure
        if is_message and self._rank == 0:
            text = text if text == str(self._error)[:2000] else f"rank {rank} on {host}: {text}"
            log.warning("%s", text) if code > 128 else print(f"error: {text}", file=sys.stderr)
        elif not is_message and rank == self._rank:
            log.error("rank %d on %s failed; ending all ranks:", rank, host, exc_info=self._error)
        elif not is_message and self._local_rank == 0:  # once per node, because each node may have a separate log
            log.error("ended because rank %d on %s failed: %s", rank, host, text)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(wait)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)


def _connect(host: str, address: str, port: int) -> socket.socket:
    """Connect to the previous rank; the connection ends within 20 s if that rank's node is lost."""
    try:
        connection = socket.create_connection((address, port), 60)
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach {host} at {address}:{port} ({error}); allow connections between the "
            "nodes on every port above 1023."
        ) from error
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
