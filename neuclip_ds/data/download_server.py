"""Processes that download shards, forked by a server that imports fsspec and its backends once.

A process that fetches starts one server, a new program with a single thread. The processes that it forks can be killed
when a read blocks. They inherit neither threads nor locks of a process that has used fsspec, with which a download can
block for ever. Each creates a new file system object, which reads files of credentials anew.

For each download the server receives two sockets: one is passed to the forked process, which receives the request
(the URL may hold a secret, so it is on no command line) and sends the outcome. When the other one is closed, because
the download is over or the process that fetches has been killed, the server kills the download.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import fsspec

from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.download import download
from neuclip_ds.data.failures import FailureKind, TransferFailure, describe_error
from neuclip_ds.distributed.stop_signals import STOP_SIGNALS

_IMPORTED = ("http", "https", "s3")  # backends that start no thread when they are imported; gcsfs imports gRPC
_LOCAL = "file"  # a part of fsspec: nothing more is imported
_LONGEST = 16  # bytes of such a name
_REAP = 1.0  # seconds after which the server looks for killed processes that have ended
_ROOT = Path(__file__).parents[2]  # folder of the package, which may be a checkout that is not installed


class DownloadProcess:
    """A process that downloads one shard, and ends with this one, even if that is killed.

    Raises:
        OSError: the server cannot be started.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection, connection = Pipe()
        self._open, watched = socket.socketpair()  # the process may run while it is open
        protocol = url.partition("://")[0]
        with connection, watched:
            _server.fork(protocol if protocol in _IMPORTED else _LOCAL, connection.fileno(), watched.fileno())

    def download(self, target: Path, timeout: float, size: int | None) -> None:
        """Download to a file, with the environment variables that this process has now; see `download.download`.

        Raises:
            TransferFailure: the download has failed or was killed.
        """
        try:
            self._connection.send((dict(os.environ), self._url, target.absolute(), timeout, size))
            outcome = self._connection.recv()
        except (EOFError, ConnectionError):
            raise TransferFailure("the process of the download was killed", FailureKind.OUTAGE) from None
        if outcome is not None:
            raise TransferFailure(*outcome)

    def kill(self) -> None:
        """Have the process killed, from any thread."""
        with suppress(OSError):  # it is closed
            self._open.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Have the process killed if it still runs, and free its sockets."""
        self._open.close()
        self._connection.close()


class _Server:
    """The server of this process, which starts when it is first needed and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, backend: str, *sockets: int) -> None:
        """Request a process that downloads, which uses these two sockets."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            with suppress(ConnectionError):  # killed meanwhile, which shows at the sockets
                socket.send_fds(self._control, [backend.encode()], sockets)

    def _start(self) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with control:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=control.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals to this process's group do not reach it
                env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            )


_server = _Server()


def _forget() -> None:
    """Leave the server to the process that this one was forked from."""
    global _server
    _server = _Server()


os.register_at_fork(after_in_child=_forget)


def _serve(control: socket.socket) -> None:
    """Fork a process for each pair of sockets that arrives, until the process that fetches ends."""
    running: dict[socket.socket, int] = {}
    killed: list[int] = []
    while True:
        for ready in wait([control, *running], _REAP if killed else None):
            if ready is not control:
                assert isinstance(ready, socket.socket)
                killed.append(_kill(running.pop(ready)))
                ready.close()
                continue
            backend, sockets, *_ = socket.recv_fds(control, _LONGEST, 2)
            if not backend:
                for pid in running.values():
                    _kill(pid)
                return
            with suppress(Exception):  # a backend that cannot be imported is the download's failure
                fsspec.get_filesystem_class(backend.decode())
            watched = socket.socket(fileno=sockets[1])
            with Connection(sockets[0]) as connection, suppress(OSError):  # no process: the other end shows it
                running[watched] = _fork(connection, control)
        killed = [pid for pid in killed if os.waitpid(pid, os.WNOHANG)[0] == 0]


def _kill(pid: int) -> int:
    """Kill a process, which may have ended, and what it has started."""
    os.killpg(pid, signal.SIGKILL)  # not yet waited for, so that no other process has this number
    return pid


def _fork(connection: Connection, control: socket.socket) -> int:
    """Return the number of a new process, which leads a process group and runs the download."""
    server = os.getpid()
    if pid := os.fork():
        os.setpgid(pid, pid)
        return pid
    try:
        end_with_parent(server)
        control.close()
        _run(connection)
    finally:
        os._exit(0)  # without waiting for the threads of other ranges


def _run(connection: Connection) -> None:
    """Receive a request, download, and send None or the reason and kind of the failure."""
    environment, *request = connection.recv()
    os.environ.clear()
    os.environ.update(environment)
    fsspec.config.conf.clear()  # read when fsspec was imported
    fsspec.config.set_conf_files(fsspec.config.conf_dir, fsspec.config.conf)
    fsspec.config.set_conf_env(fsspec.config.conf)
    outcome = None
    try:
        download(*request)
    except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
        failure = describe_error(error)
        outcome = str(failure), failure.kind
    connection.send(outcome)


def main() -> NoReturn:
    """Serve the process at the other end of the standard input, and end with it."""
    for number in STOP_SIGNALS:  # launchers send them to the whole tree; the process that fetches decides
        signal.signal(number, signal.SIG_IGN)
    _serve(socket.socket(fileno=sys.stdin.fileno()))
    sys.exit()


if __name__ == "__main__":
    main()
