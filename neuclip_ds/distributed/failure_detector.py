"""A rank that fails ends all ranks, whoever launched them, and the reason is said once.

A rank that died leaves the others in a collective: NCCL does not notice, and no launcher tells the other nodes under
`--no_ssh` or pdsh. So every rank keeps a TCP connection to rank 0. The kernel closes the connection of a process that
dies, by whatever cause, and TCP's probes find a node that has gone; neither depends on what Python is doing. A rank
that fails by an exception says so before it lets go of the process group, hence before its failure makes others fail.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import secrets
import socket
import sys
import threading
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.errors import TrainingDiverged, UserError

log = logging.getLogger(__name__)

_GATHERING = 1.0  # seconds in which failures are taken for one, as one rank's makes others fail
_ANSWER = 10.0  # seconds that a failed rank waits for rank 0's word
_CONNECT = 60.0  # seconds in which all ranks must have connected
_DIED = "it died without a word (killed, out of memory, or its node is lost)"


class Failure(NamedTuple):
    """Why a rank has ended before its time."""

    rank: int
    host: str
    text: str
    code: int = 1
    is_message: bool = False  # a sentence for the user, which needs no traceback

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.text}"


class FailureDetector:
    """Ties the ranks together while the block runs. Where it fails, no rank leaves it: all processes end.

    The exit code is 2 for a `UserError`, else 1. Rank 0 prints `UserError` and `TrainingDiverged` as `error: ...`, with
    rank and host where it is not rank 0's as well. Any other exception is logged with its traceback by the rank that
    failed first, and in one line by the first rank of each node.

    Args:
        environment: this rank.
        store: which all ranks share; rank 0's node is reached at MASTER_ADDR.

    Raises:
        UserError: rank 0 cannot be reached.
    """

    def __init__(self, environment: RankEnvironment, store: dist.Store) -> None:
        self._rank, self._local_rank = environment.rank, environment.local_rank
        self._host = socket.gethostname()
        self._hub = _Hub(environment.world_size) if self._rank == 0 else None
        if self._hub is not None:
            store.set("lifeline", json.dumps([self._hub.port, self._hub.token]))
        port, token = json.loads(store.get("lifeline"))
        self._socket = self._connect(os.environ["MASTER_ADDR"], port)
        self._send({"token": token, "rank": self._rank, "host": self._host})
        self._leaving = False
        self._told = threading.Event()

    def __enter__(self) -> FailureDetector:
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leaving = error is None
        if error is None:
            self._send({"left": True})
            if self._hub is not None:
                self._told.wait(_ANSWER)  # until the others know that the end of their connections is no death
            return
        failure = self._failure(error)
        self._send(failure._asdict())
        self._told.wait(_ANSWER)  # when another rank failed first, the thread ends this process
        if not failure.is_message:
            log.error("rank %d on %s failed and ends all ranks:", self._rank, self._host, exc_info=error)
        self._end(failure)

    def _failure(self, error: BaseException) -> Failure:
        is_message = isinstance(error, (UserError, TrainingDiverged))
        text = str(error) if is_message else f"{type(error).__name__}: {error}"
        return Failure(self._rank, self._host, text[:2000], 2 if isinstance(error, UserError) else 1, is_message)

    def _connect(self, host: str, port: int) -> socket.socket:
        try:
            connection = socket.create_connection((host, port), timeout=_CONNECT)
        except OSError as error:
            raise UserError(
                f"Rank {self._rank} cannot reach rank 0 at {host}:{port}: the nodes must reach each other at any port "
                f"above 1023 ({error})."
            ) from error
        connection.settimeout(None)
        _watch(connection)
        return connection

    def _send(self, words: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
        except OSError:  # rank 0 has gone, which the thread sees too
            log.debug("rank 0 could not be told", exc_info=True)

    def _listen(self) -> None:
        """The thread: waits for rank 0's word, or for its end."""
        try:
            line = self._socket.makefile("rb").readline()
        except OSError:
            line = b""
        if self._leaving or line == b"null\n":
            self._told.set()
            return
        verdict = Failure(*json.loads(line)) if line else Failure(0, os.environ["MASTER_ADDR"], _DIED)
        if verdict.rank == self._rank:
            self._told.set()
            return
        if self._local_rank == 0 and not verdict.is_message:  # on every node, which may have a terminal of its own
            log.error("ended, because rank %d on %s failed: %s", *verdict[:3])
        self._end(verdict)

    def _end(self, verdict: Failure) -> NoReturn:
        """Ends this process from either thread, as the other may be in a collective for ever."""
        if verdict.is_message and self._rank == 0:
            sys.stderr.write(f"error: {verdict if verdict.rank else verdict.text}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        if self._hub is not None:
            self._hub.wait_until_alone()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(verdict.code)


class _Hub:
    """Rank 0's end of all connections, in a thread: hears of the first failure and tells all ranks."""

    def __init__(self, world_size: int) -> None:
        self.token = secrets.token_hex(16)  # a port scanner is no rank
        self._world_size = world_size
        self._server = _listening_socket()
        self.port: int = self._server.getsockname()[1]
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._came: set[int] = set()
        self._failures: list[Failure] = []
        self._verdict: Failure | None = None
        self._alone = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="lifeline hub", daemon=True).start()

    def wait_until_alone(self) -> None:
        """Until the other ranks have gone: a connection that is closed with words unread loses those on their way."""
        self._alone.wait(2 * _GATHERING)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._attend, sock=self._server)
        await asyncio.sleep(_CONNECT)
        for rank in sorted(set(range(self._world_size)) - self._came):
            self._fail(Failure(rank, "its node", f"it has not connected within {_CONNECT:.0f} s"))
        await server.serve_forever()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One rank, from its greeting to its end."""
        greeting = await _words(reader)
        if greeting is None or greeting.get("token") != self.token:
            writer.close()
            return
        rank, host = int(greeting["rank"]), str(greeting["host"])
        _watch(writer.get_extra_info("socket"))
        self._writers[rank] = writer
        self._came.add(rank)
        if self._verdict is not None:
            _tell(writer, self._verdict)
        words = await _words(reader)
        if words is None:
            self._fail(Failure(rank, host, _DIED))
        elif "left" not in words:
            self._fail(Failure(**words))
        elif rank == 0:
            self._tell_all(None)
        while await _words(reader) is not None:
            pass
        del self._writers[rank]
        if set(self._writers) <= {0}:
            self._alone.set()

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        if len(self._failures) == 1:
            asyncio.get_running_loop().call_later(_GATHERING, self._decide)
        elif len(self._failures) == self._world_size:
            self._decide()

    def _decide(self) -> None:
        """The cause among failures that came together: a death, else a message that rank 0 has too, else the first."""
        if self._verdict is not None:
            return
        first = self._failures[0]
        shared = [failure for failure in self._failures if failure.rank == 0 and failure.text == first.text]
        died = [failure for failure in self._failures if failure.text == _DIED]
        self._verdict = next(iter([*died, *shared, first]))
        self._tell_all(self._verdict)

    def _tell_all(self, verdict: Failure | None) -> None:
        for rank in sorted(self._writers, reverse=True):  # rank 0 last, whose end closes the connections
            _tell(self._writers[rank], verdict)


async def _words(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next line; None at the end of the connection, or where it does not speak as a rank does."""
    try:
        words = json.loads(await reader.readline())
    except (OSError, ValueError):
        return None
    return words if isinstance(words, dict) else None


def _tell(writer: asyncio.StreamWriter, verdict: Failure | None) -> None:
    writer.write(json.dumps(verdict).encode() + b"\n")


def _listening_socket() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _watch(connection: Any) -> None:
    """Lets the connection end with its process, and within 20 s of silence when the other node is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    os.register_at_fork(after_in_child=lambda: _let_go(connection))


def _let_go(connection: Any) -> None:
    """In a forked loader process, which would keep the connection open after our end."""
    number = connection.fileno()
    if number >= 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, number)  # and not closed, as the number would soon be that of another file
        os.close(nothing)
