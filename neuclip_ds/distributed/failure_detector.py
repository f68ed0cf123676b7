"""Failure detector: when a rank fails, all ranks exit under any launcher, and the reason is logged.

When a rank dies, the others hang in a collective: NCCL does not notice, and if DeepSpeed's launcher uses pdsh or
`--no_ssh`, nothing informs the other nodes. Each rank therefore keeps an idle TCP connection to the previous rank. The
kernel closes the connection when the previous rank dies or its node does not answer for 20 s, even if Python is busy.
The first failure is stored in torch's store, which all ranks poll twice a second. Rank 0, which may serve the store,
exits last.

The log also names hung ranks. A rank that stays at the same line of code for 10 minutes publishes how many collectives
its communicator has started (DeepSpeed's are not counted). Ranks that have started fewer collectives than others, or
have published nothing, keep the others waiting.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.store_entries import parse_entry, read_entry, write_entry
from neuclip_ds.errors import Interrupted, TrainingDiverged, UserError, counted, exit_code

log = logging.getLogger(__name__)

_POLL_INTERVAL = 0.5  # seconds
_REPORT_DELAY = 1.0  # seconds that a failed rank waits before it reports: another rank's death may be the cause
_CLOSING_TIME = 15.0  # seconds for rank 0 to write its report and end its trackers before another rank ends it
_STORE_TIMEOUT = 30.0  # seconds after which a store that does not answer is considered lost
_CONNECT_TIMEOUT = 300.0  # seconds within which the ranks must connect their process groups
_STUCK_AFTER = 600.0  # seconds at the same line after which a rank counts as stuck
_STUCK_SPREAD = 60.0  # seconds within which all ranks that wait for the same rank are stuck, too
_MAX_MESSAGE = 2000  # characters of an error that other ranks receive
_MAX_NAMED_RANKS = 8
_NOT_CONNECTED = (
    "the ranks did not connect to each other over NCCL or gloo within 5 minutes. Set NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME to the network interface that all nodes share (ip addr lists them); with deepspeed --hostfile, "
    "set them in .deepspeed_env. NCCL_DEBUG=INFO prints what NCCL tries."
)
_PACKAGE = f"{Path(__file__).parents[1]}/"
_DIED = (
    "it was killed and reported no error (possible causes: out of memory, a signal, a lost node, or a collective that "
    "a hook has not called on all ranks)"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a rank ended early."""

    rank: int
    host: str
    text: str
    code: int = 1
    is_message: bool = False  # a message for the user, without a traceback


@dataclass(frozen=True, kw_only=True)
class StuckAt:
    """The line of code at which a rank is stuck, and the number of collectives that the rank has started."""

    collectives_started: int
    line: str


@dataclass(frozen=True, kw_only=True)
class _Address:
    """The address at which the failure detector of a rank listens."""

    host: str  # name for messages
    address: str
    port: int
    local_rank: int


class FailureDetector:
    """Ends all ranks if its `with` block fails on any rank.

    The exit code is 2 for a `UserError`, 128 + the signal's number for `Interrupted`, and otherwise 1. Rank 0 reports
    `UserError`, `Interrupted` or `TrainingDiverged` without a traceback. For any other exception, the rank that failed
    first logs the traceback. In that case, or if a rank was killed, local rank 0 of each node logs one line; if local
    rank 0 itself failed first, the next rank of its node logs the line.

    Args:
        environment: rank and world size of this process; all ranks (at least two) must enter the block.
        store: a dedicated connection to the store that rank 0 or torchrun serves.
        address: address at which the other nodes reach this machine.

    Attributes:
        communicator: communicator between the ranks. The caller must set it when the ranks have connected their process
            groups; if it is not set within 5 minutes, all ranks exit with code 2.

    Raises:
        UserError: the previous rank cannot be reached, or its entry in the store, or rank 0's, is unreadable.
    """

    communicator: Communicator | None = None

    def __init__(self, environment: RankEnvironment, store: dist.Store, address: str) -> None:
        self._rank = environment.rank
        self._local_rank = environment.local_rank
        self._world_size = environment.world_size
        self._previous_rank = (self._rank - 1) % self._world_size
        self._store = store
        self._host = socket.gethostname()
        self._started_at = time.monotonic()

        # how this rank ends
        self._error: BaseException | None = None  # raised on this rank
        self._failed_at = 0.0
        self._leaving = False  # the block has ended without an error
        self._left = threading.Event()  # all ranks know that this rank has left
        self._wake = threading.Event()  # ends the pause of `_watch_store`

        # what this rank knows about the others
        self._previous_rank_ended = False
        self._polls_without_answer = 0  # since the store last answered
        self._last_poll = self._started_at
        self._longest_pause = 0.0  # seconds for which this process did not run

        # whether this rank is stuck
        self._position: list[object] = []  # collectives started and call stack of the main thread since `_moved_at`
        self._moved_at = self._started_at
        self._published_position = False
        self._logged_awaited_ranks = False

        # a socket that never accepts: the kernel completes connections
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family)
        os.register_at_fork(after_in_child=self._listener.close)  # a loader process must not keep the socket open
        port = self._listener.getsockname()[1]
        listening = _Address(host=self._host, address=address, port=port, local_rank=self._local_rank)
        write_entry(store, f"rank/{self._rank}", listening)
        self._host_of_rank_0 = self._address_of(0).host
        previous = self._address_of(self._previous_rank)
        self._host_of_previous_rank = previous.host
        self._logs_for_previous_rank = previous.local_rank == 0
        self._connection = _connect(previous)

    def __enter__(self) -> "FailureDetector":
        for watch in (self._watch_store, self._watch_connection):
            threading.Thread(target=watch, name="failure detector", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._failed_at = time.monotonic()
        self._error = error
        while error is not None:  # until `_watch_store` ends all ranks
            time.sleep(1)
        self._leaving = True
        self._wake.set()
        self._left.wait()
        self._connection.close()
        self._listener.close()

    def _address_of(self, rank: int) -> _Address:
        """Wait until a rank has published its address, and return it; raise `UserError` if it is unreadable."""
        return read_entry(self._store, f"rank/{rank}", _Address)

    def _host_of(self, rank: int) -> str:
        """Return the name of a rank's host for a message, or "an unknown host" if the rank's entry is unreadable."""
        try:
            return self._address_of(rank).host
        except UserError:
            return "an unknown host"

    def _find_failure(self) -> Failure | None:
        """Return the failure of this rank or of the previous rank, or None; called repeatedly."""
        now = time.monotonic()
        self._longest_pause = max(self._longest_pause, now - self._last_poll)
        self._last_poll = now
        if self._previous_rank_ended and not self._store.check([f"left/{self._previous_rank}"]):
            if self._rank == 0 and self._longest_pause > _STORE_TIMEOUT:
                text = f"it did not run for {self._longest_pause:.0f} s (suspended?), so the other ranks exited"
                return Failure(rank=0, host=self._host, text=text)
            return Failure(rank=self._previous_rank, host=self._host_of_previous_rank, text=_DIED)
        error = self._error
        if error is None:
            is_connected = self.communicator is not None
            if is_connected or now <= self._started_at + _CONNECT_TIMEOUT:
                return None
            return Failure(rank=self._rank, host=self._host, text=_NOT_CONNECTED, code=2, is_message=True)
        delay = _REPORT_DELAY
        if self._rank != 0 and isinstance(error, TrainingDiverged | Interrupted):
            delay += _CLOSING_TIME  # usually, rank 0 raises the same error, and closes more than this rank does
        if now < self._failed_at + delay:
            return None
        is_message = isinstance(error, UserError | TrainingDiverged | Interrupted)
        text = str(error) if is_message else f"{type(error).__name__}: {error}"
        return Failure(
            rank=self._rank,
            host=self._host,
            text=text[:_MAX_MESSAGE],
            code=exit_code(error),
            is_message=is_message,
        )

    def _watch_store(self) -> None:
        """Report a failure of the previous rank or of this rank; end the process once any rank has failed."""
        wait = 0.0
        try:
            while not self._store.check(["error"]):
                self._polls_without_answer = 0
                failure = self._find_failure()
                if failure is not None:
                    self._store.compare_set("error", "", json.dumps(asdict(failure)))  # unless another rank was first
                elif self._leaving:
                    self._store.set(f"left/{self._rank}", "")
                    # the store closes when rank 0 ends, so rank 0 leaves last
                    all_left = [f"left/{rank}" for rank in range(self._world_size)]
                    if self._rank != 0 or self._store.check(all_left):
                        self._left.set()
                        return
                elif self.communicator is not None and dist.is_initialized():  # not after `leave`: only rank 0 is busy
                    self._watch_progress(self.communicator)
                self._wake.wait(0.05 if self._leaving else _POLL_INTERVAL)
                self._wake.clear()
            failure = _read_failure(self._store.get("error"))
            # launchers stop all ranks if one exits, so rank 0 reports first; it exits last, so that all read `error`
            wait = 3 * _POLL_INTERVAL if self._rank == 0 else 2 * _POLL_INTERVAL
        except dist.DistError:
            failure = Failure(rank=0, host=self._host_of_rank_0, text=_DIED)
        self._end(failure, wait)

    def _watch_connection(self) -> None:
        """Record that the previous rank has ended; end this process if the store has not responded for 30 s."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not self._left.is_set():
            if self._previous_rank_ended:
                time.sleep(_POLL_INTERVAL)
            elif poll.poll(1000 * _POLL_INTERVAL):
                self._previous_rank_ended = True
                self._wake.set()
            self._polls_without_answer += 1  # counted in this thread, which also stops while the process is paused
            if self._polls_without_answer * _POLL_INTERVAL > _STORE_TIMEOUT:
                text = f"it has not answered for {_STORE_TIMEOUT:.0f} s"
                self._end(Failure(rank=0, host=self._host_of_rank_0, text=text))

    def _watch_progress(self, communicator: Communicator) -> None:
        """If this rank is stuck, publish where; the lowest stuck rank also logs which ranks keep the others waiting."""
        started = communicator.collectives_started
        stack = list(_stack_of_main_thread())
        now = time.monotonic()
        seconds = now - self._moved_at
        if [started, *stack] != self._position:
            self._position = [started, *stack]
            self._moved_at = now
            if self._published_position:
                self._store.set(f"stuck/{self._rank}", "null")
            self._published_position = False
            self._logged_awaited_ranks = False
        elif seconds > _STUCK_AFTER and not self._published_position:
            lines_of_package = (line.removeprefix(_PACKAGE) for line in stack if line.startswith(_PACKAGE))
            stuck = StuckAt(collectives_started=started, line=next(lines_of_package, stack[0]))
            write_entry(self._store, f"stuck/{self._rank}", stuck)
            self._published_position = True
        elif seconds > _STUCK_AFTER + _STUCK_SPREAD and not self._logged_awaited_ranks:
            self._logged_awaited_ranks = True
            self._log_awaited_ranks()

    def _log_awaited_ranks(self) -> None:
        """Log which ranks are behind the others, unless a stuck rank with a lower number does so."""
        if any(self._stuck_at(rank) for rank in range(self._rank)):
            return
        stuck = {rank: self._stuck_at(rank) for rank in range(self._world_size)}
        most_started = max(position.collectives_started for position in stuck.values() if position)
        behind = []
        for rank, position in stuck.items():
            if position is None or position.collectives_started < most_started:
                behind.append(rank)
        named = []
        for rank in (behind or list(stuck))[:_MAX_NAMED_RANKS]:
            position = stuck[rank]
            doing = "is busy or stopped" if position is None else f"is at {position.line}"
            named.append(f"rank {rank} on {self._host_of(rank)}, which {doing}")
        more = len(behind) - _MAX_NAMED_RANKS
        log.warning(
            "the run has made no progress for %.0f s: %s %s%s; `py-spy dump --pid PID` on a rank's host shows the "
            "rank's stack",
            _STUCK_AFTER + _STUCK_SPREAD,
            "the ranks wait for" if behind else "no rank is behind the others; check",
            "; ".join(named),
            f"; and {counted(more, 'other rank')}" if more > 0 else "",
        )

    def _stuck_at(self, rank: int) -> StuckAt | None:
        """Return the line of code at which `rank` is stuck, or None if it is not stuck."""
        if not self._store.check([f"stuck/{rank}"]):
            return None
        with suppress(UserError):  # also if the rank has moved since, which it publishes as "null"
            return read_entry(self._store, f"stuck/{rank}", StuckAt)
        return None

    def _end(self, failure: Failure, wait: float = 0.0) -> NoReturn:
        """Report the failure and end the process; runs in a background thread because the main thread may be stuck."""
        if failure.is_message:
            if self._rank == 0:
                self._print_message(failure)
        elif failure.rank == self._rank and self._error is not None:
            log.error("rank %d on %s failed; ending all ranks:", failure.rank, failure.host, exc_info=self._error)
        elif self._local_rank == 0 or (self._logs_for_previous_rank and failure.rank == self._previous_rank):
            # once per node, because each node may have a separate log
            name = f"rank {failure.rank}" if failure.rank >= 0 else "a rank"  # which sent an unreadable message
            log.error("ended because %s on %s failed: %s", name, failure.host, failure.text)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(wait)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(failure.code)

    def _print_message(self, failure: Failure) -> None:
        """Print an error of this rank as it is, and an error of another rank with the rank and its host."""
        text = failure.text
        if text != str(self._error)[:_MAX_MESSAGE]:
            text = f"rank {failure.rank} on {failure.host}: {text}"
        if failure.code > 128:  # a signal is not an error
            log.warning("%s", text)
        else:
            print(f"error: {text}", file=sys.stderr)


def _read_failure(content: bytes) -> Failure:
    """Read a failure that a rank has stored; an exit code of 0 or an unreadable message never makes a run a success."""
    try:
        failure = parse_entry(content, "error", Failure)
    except UserError:
        return Failure(rank=-1, host="an unknown host", text=f"its message is unreadable: {content[:100]!r}")
    return failure if 1 <= failure.code <= 255 else replace(failure, code=1)


def _stack_of_main_thread() -> Iterator[str]:
    """Yield the lines of code that the main thread is executing, innermost first."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    for called, line in traceback.walk_stack(frame):
        yield f"{called.f_code.co_filename}:{line} in {called.f_code.co_name}"


def _connect(rank: _Address) -> socket.socket:
    """Connect to the previous rank; the connection ends within 20 s if that rank's node is lost.

    Raises `UserError` if the rank cannot be reached.
    """
    try:
        connection = socket.create_connection((rank.address, rank.port), 60)
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach {rank.host} at {rank.address}:{rank.port} ({error}); allow "
            "connections between the nodes on every port above 1023."
        ) from error
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return connection
