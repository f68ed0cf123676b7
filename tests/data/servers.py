"""An HTTP server that injects faults into its responses."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; raise AssertionError after 60 seconds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


class Files(ThreadingHTTPServer):
    """A server on 127.0.0.1 for `files` (relative path -> bytes); S3 clients see the top folder as a bucket.

    Attributes:
        gets: the number of GET requests per path; omits refused requests and ranges that start after byte 0.
        heads: the number of HEAD requests per path.
        authorizations: the Authorization headers of all GET requests that have one.
        faults: path -> the faults of its next requests, one per request: an error status; `cut` or `stall` (the
            connection is closed or hangs after half of the body), `short` (a third of the body is the whole answer), or
            `slow` (the first half of the body takes a second).
        gate: an event; the second half of a body is sent once the event is set, which it is by default.
        delay: the number of seconds to wait before sending the second half of a body.
        refuses: the status of every response to a GET request, if set.
        ignores_ranges: whether every request for a range of bytes is answered with the whole file.
        sent: the total size in bytes of the bodies of all answers, also those that were cut short.
        most: the maximum number of concurrent GET requests, if set; any more get 503 SlowDown.
    """

    daemon_threads = True
    request_queue_size = 128  # pending connections; with the default of 5, clients would retry others after a second

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.gets: Counter[str] = Counter()
        self.heads: Counter[str] = Counter()
        self.authorizations: list[str] = []
        self.faults: dict[str, list[int | str]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.delay = 0.0
        self.refuses: int | None = None
        self.ignores_ranges = False
        self.sent = 0
        self.most: int | None = None
        self.active = self.refused = 0
        self.counting = threading.Lock()
        self.over = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"

    def handle_error(self, request, client_address) -> None:
        """Ignore errors caused by clients that hang up, as some tests make them do."""


class _Handler(BaseHTTPRequestHandler):
    server: Files

    def do_HEAD(self) -> None:
        name = self.path.strip("/")
        self.server.heads[name] += 1
        if name in self.server.files:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.files[name])))
            self.end_headers()
        else:
            self.send_error(404)

    def do_GET(self) -> None:
        if authorization := self.headers["Authorization"]:
            self.server.authorizations.append(authorization)
        with self.server.counting:
            self.server.active += 1
            busy = self.server.most is not None and self.server.active > self.server.most
        try:
            self._answer(503 if busy else self.server.refuses)
        finally:
            with self.server.counting:
                self.server.active -= 1

    def _answer(self, refusal: int | None) -> None:
        name = self.path.strip("/")
        if listing := "list-type=2" in name:
            name, _, query = name.partition("?")
            prefix = parse_qs(query).get("prefix", [""])[0]
        if refusal is not None:
            self.server.refused += 1
            self.send_error(refusal, "SlowDown" if refusal == 503 else None)
            return
        if self._range(0)[0] == 0:
            self.server.gets[name] += 1
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            self.send_error(fault)
        elif name in self.server.files:
            self._send(self.server.files[name], fault)
        elif listing:  # a listing of the bucket, which is the top folder
            keys = ((path.partition("/")[2], len(data)) for path, data in sorted(self.server.files.items()))
            keys = ((key, size) for key, size in keys if key.startswith(prefix))
            listed = "".join(f"<Contents><Key>{key}</Key><Size>{size}</Size></Contents>" for key, size in keys)
            self._send(f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>".encode(), None)
        elif found := [path for path in self.server.files if path.startswith(name)]:
            self._send("".join(f'<a href="/{path}">{path}</a>' for path in found).encode(), None)
        else:
            self.send_error(404)

    def _send(self, data: bytes, fault: str | None) -> None:
        start, end = self._range(len(data))
        partial = (start, end) != (0, len(data))
        data = data[start:end]
        data = data[: len(data) // 3] if fault == "short" else data
        with self.server.counting:
            self.server.sent += len(data)
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        for start in range(0, half, step := half // 10 if fault == "slow" else max(half, 1)):
            self.wfile.write(data[start : min(start + step, half)])
            time.sleep(0.1 if fault == "slow" else 0)
        if fault == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "stall":
            self.server.over.wait()
            return
        time.sleep(self.server.delay)
        self.server.gate.wait()
        self.wfile.write(data[half:])

    def _range(self, size: int) -> tuple[int, int]:
        """Return the start and end of the requested byte range in a body of `size` bytes."""
        header = self.headers["Range"]
        if header is None or self.server.ignores_ranges:
            return 0, size
        first, last = header.removeprefix("bytes=").split("-")
        return int(first), min(int(last) + 1, size) if last else size

    def log_message(self, *arguments) -> None:
        pass


@contextmanager
def files_server() -> Iterator[Files]:
    server = Files()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
