"""Failure detector: when a rank fails, all ranks exit under any launcher, and the reason is logged once.

A dead rank leaves the others in a collective: NCCL does not notice, and under `--no_ssh` or pdsh no launcher informs
the other nodes. So every rank keeps a TCP connection to rank 0. The kernel closes the connection of a process that
dies, and TCP keepalive finds a lost node; neither depends on what Python is doing. A rank that fails with an exception
reports it before it leaves the process group, hence before other ranks fail because of it.

Whoever reaches the port may connect, so both sides sign every message with the launch's key, and the server closes
connections that do not greet it in time.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from neuclip_ds.distributed.authentication import CHANGED, Channel, sign, verify
from neuclip_ds.distributed.environment import RankEnvironment
from neuclip_ds.distributed.listening import listen_at
from neuclip_ds.distributed.stop_signals import ending_by
from neuclip_ds.errors import Interrupted, TrainingDiverged, UserError

log = logging.getLogger(__name__)

_GATHER_WINDOW = 1.0  # seconds in which failures count as one, since one rank's failure makes others fail
_VERDICT_TIMEOUT = 10.0  # seconds that a failed rank waits for rank 0's verdict
_CONNECT_TIMEOUT = 60.0  # seconds within which all ranks must connect
_GREETING_TIMEOUT = 10.0  # seconds until a connection must have greeted
_MOST_PENDING = 128  # connections that have not greeted; one more closes the oldest
_LONGEST = 1 << 16  # bytes of a message
_DIED = "it was killed and reported no error (out of memory, a signal, or a lost node)"


class Failure(NamedTuple):
    """Why a rank has ended early."""

    rank: int
    host: str
    text: str
    code: int = 1
    is_message: bool = False  # a message for the user, without a traceback

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.text}"


class FailureDetector:
    """End all ranks when the block fails on one of them.

    The exit code is 2 for a `UserError`, 128 + its number for a signal (`Interrupted`), else 1. Rank 0 prints
    `UserError` and `TrainingDiverged` as `error: ...`, and logs `Interrupted`, with rank and host unless rank 0 has the
    same error. Any other exception is logged with its traceback by the rank that failed first, and in one line by the
    first rank of each node. All ranks share the store and the key; rank 0's node is reached at MASTER_ADDR, else
    `UserError` is raised.
    """

    def __init__(self, environment: RankEnvironment, store: dist.Store, key: bytes) -> None:
        self._rank, self._local_rank = environment.rank, environment.local_rank
        self._host = socket.gethostname()
        self._hub = _Hub(environment.world_size, key) if self._rank == 0 else None
        if self._hub is not None:
            store.set("failure_detector", sign(key, "port", str(self._hub.port)))
        self._connect(os.environ["MASTER_ADDR"], store.get("failure_detector").decode(errors="replace"), key)
        self._leaving = False
        self._answered = threading.Event()
        self._signals = ending_by(self._fail)

    def __enter__(self) -> FailureDetector:
        self._signals.__enter__()
        threading.Thread(target=self._listen, name="failure detector", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._signals.__exit__(None, None, None)
        self._leaving = error is None
        if error is None:
            self._send({"left": True})
            if self._hub is not None:
                self._answered.wait(_VERDICT_TIMEOUT)  # until the others know that rank 0 leaves without failure
            return
        self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        """Report this rank's failure, and end this process with that which ends all ranks."""
        is_message = isinstance(error, (UserError, TrainingDiverged, Interrupted))
        text = str(error) if is_message else f"{type(error).__name__}: {error}"
        code = error.code if isinstance(error, Interrupted) else 2 if isinstance(error, UserError) else 1
        failure = Failure(self._rank, self._host, text[:2000], code, is_message)
        self._send(failure._asdict())
        self._answered.wait(_VERDICT_TIMEOUT)  # if another rank failed first, the thread ends this process
        if not failure.is_message:
            log.error("rank %d on %s failed; ending all ranks:", self._rank, self._host, exc_info=error)
        self._end(failure)

    def _connect(self, host: str, signed_port: str, key: bytes) -> None:
        """Connect to rank 0 and greet it; again where strangers have taken its time."""
        deadline = time.monotonic() + _CONNECT_TIMEOUT
        try:
            port = int(verify(key, "port", signed_port))
        except ValueError as error:
            raise UserError(CHANGED) from error
        while True:
            try:
                self._socket = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
                self._lines = self._socket.makefile("rb")
                self._greet(key)
                break
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"Rank {self._rank} cannot reach rank 0 at {host}:{port} ({error}); allow connections between "
                        "the nodes at every port above 1023."
                    ) from error
                time.sleep(0.2)
        self._socket.settimeout(None)
        _enable_keepalive(self._socket)

    def _greet(self, key: bytes) -> None:
        """Exchange nonces, report who this is and wait for the answer; raise `ValueError` if it is not rank 0's."""
        nonce = secrets.token_hex(16)
        self._socket.sendall(nonce.encode() + b"\n")
        self._channel = Channel(key, self._lines.readline(_LONGEST).decode().strip(), nonce, serves=False)
        self._socket.sendall(self._channel.pack([self._rank, self._host]))
        self._channel.unpack(self._lines.readline(_LONGEST))

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(self._channel.pack(message))
        except OSError:  # rank 0 has ended, which the thread detects too
            log.debug("cannot send to rank 0", exc_info=True)

    def _listen(self) -> None:
        """Wait, in a thread, for rank 0's verdict or for its end."""
        try:
            found = self._channel.unpack(self._lines.readline(_LONGEST))
        except (OSError, ValueError):
            found = Failure(0, os.environ["MASTER_ADDR"], _DIED)
        if self._leaving or found is None:
            self._answered.set()
            return
        verdict = Failure(*found)
        if verdict.rank == self._rank:
            self._answered.set()
            return
        if self._local_rank == 0 and not verdict.is_message:  # once per node, each of which may have its own log
            log.error("ended because rank %d on %s failed: %s", *verdict[:3])
        self._end(verdict)

    def _end(self, verdict: Failure) -> NoReturn:
        """End this process from either thread, as the other may be stuck in a collective."""
        if verdict.is_message and self._rank == 0:
            text = str(verdict) if verdict.rank else verdict.text
            if verdict.code > 128:
                log.warning("%s", text)
            else:
                sys.stderr.write(f"error: {text}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        if self._hub is not None:
            self._hub.wait_until_alone()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(verdict.code or 1)


class _Hub:
    """Rank 0's server, in a thread: receives failures and sends the verdict to all ranks."""

    def __init__(self, world_size: int, key: bytes) -> None:
        self._world_size, self._key = world_size, key
        self._server = listen_at(os.environ["MASTER_ADDR"])
        self.port: int = self._server.getsockname()[1]
        self._pending: dict[asyncio.StreamWriter, None] = {}  # in the order in which they have connected
        self._ranks: dict[int, tuple[asyncio.StreamWriter, Channel]] = {}
        self._connected: set[int] = set()
        self._failures: list[Failure] = []
        self._verdict: Failure | None = None
        self._alone = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="failure detector hub", daemon=True).start()

    def wait_until_alone(self) -> None:
        """Wait until the other ranks have ended: closing a connection with unread data loses what was sent on it."""
        self._alone.wait(2 * _GATHER_WINDOW)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._attend, sock=self._server, limit=_LONGEST)
        await asyncio.sleep(_CONNECT_TIMEOUT)
        for rank in sorted(set(range(self._world_size)) - self._connected):
            self._fail(Failure(rank, "unknown host", f"it did not connect within {_CONNECT_TIMEOUT:.0f} s"))
        await server.serve_forever()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: one that greets as a rank does until it ends, any other for some seconds at most."""
        self._pending[writer] = None
        if len(self._pending) > _MOST_PENDING:
            next(iter(self._pending)).transport.abort()  # a rank connects again
        try:
            greeting = await asyncio.wait_for(self._welcome(reader, writer), _GREETING_TIMEOUT)
        except (OSError, ValueError, asyncio.TimeoutError):
            writer.transport.abort()
            return
        finally:
            del self._pending[writer]
        (rank, host), channel = greeting
        try:
            await self._follow(rank, host, reader, writer, channel)
        finally:
            writer.close()

    async def _welcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[tuple[int, str], Channel]:
        """Return the rank and host that greet, and the channel to them."""
        nonce = secrets.token_hex(16)
        writer.write(nonce.encode() + b"\n")
        channel = Channel(self._key, nonce, (await reader.readline()).decode().strip(), serves=True)
        rank, host = channel.unpack(await reader.readline())
        writer.write(channel.pack("welcome"))
        return (rank, host), channel

    async def _follow(
        self, rank: int, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channel: Channel
    ) -> None:
        """Wait for a rank's message and its end."""
        _enable_keepalive(writer.get_extra_info("socket"))
        self._ranks[rank] = writer, channel
        self._connected.add(rank)
        if self._verdict is not None:
            self._send(rank, self._verdict)
        message = await _read_message(reader, channel)
        if message is None:
            self._fail(Failure(rank, host, _DIED))
        elif "left" not in message:
            self._fail(Failure(**message))
        elif rank == 0:
            self._broadcast(None)
        while await _read_message(reader, channel) is not None:
            pass
        del self._ranks[rank]
        if set(self._ranks) <= {0}:
            self._alone.set()

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        if len(self._failures) == 1:
            asyncio.get_running_loop().call_later(_GATHER_WINDOW, self._decide)
        elif len(self._failures) == self._world_size:
            self._decide()

    def _decide(self) -> None:
        """Choose the cause among simultaneous failures: a death, else a message that rank 0 has too, else the first."""
        if self._verdict is not None:
            return
        first = self._failures[0]
        shared = [failure for failure in self._failures if failure.rank == 0 and failure.text == first.text]
        died = [failure for failure in self._failures if failure.text == _DIED]
        self._verdict = next(iter([*died, *shared, first]))
        self._broadcast(self._verdict)

    def _broadcast(self, verdict: Failure | None) -> None:
        for rank in sorted(self._ranks, reverse=True):  # rank 0 last, since its end closes the connections
            self._send(rank, verdict)

    def _send(self, rank: int, verdict: Failure | None) -> None:
        writer, channel = self._ranks[rank]
        writer.write(channel.pack(verdict))


async def _read_message(reader: asyncio.StreamReader, channel: Channel) -> dict[str, Any] | None:
    """Read the next message; None at the end of the connection or for anything else."""
    try:
        message: dict[str, Any] = channel.unpack(await reader.readline())
    except (OSError, ValueError):
        return None
    return message


def _enable_keepalive(connection: Any) -> None:
    """Make the connection end with its process, and within 20 s when the other node is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    os.register_at_fork(after_in_child=lambda: _detach_fork(connection))


def _detach_fork(connection: Any) -> None:
    """Detach a forked loader process, which would keep the connection open after this process ends."""
    number = connection.fileno()
    if number >= 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, number)  # not closed, since another file would reuse the number
        os.close(null)
