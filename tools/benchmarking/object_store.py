"""Serve the subfolders of a folder as S3 buckets, with the latency and bandwidth of a distant store.

The server answers the read requests of boto3, s3fs and curl: GET and HEAD of an object, with ranges, and ListObjectsV2.
URLs are path-style, and signatures are not checked. `GET /?counters` returns as JSON the numbers of requests received
and of bytes of objects sent so far; this request is neither delayed nor counted. The server listens on 127.0.0.1 and
exits at the end of its standard input, for example when its parent program ends.

Example:
    python tools/benchmarking/object_store.py FOLDER --latency-ms 50 --bandwidth-mb 20
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape

_PIECE = 1 << 16  # bytes sent at once
_BURST = 0.05  # seconds of unused bandwidth that may be used later
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_ISO_DATE = "2026-01-01T00:00:00.000Z"


class Counters(NamedTuple):
    """Requests that a store has received, and bytes of objects that it has sent."""

    requests: int
    bytes: int

    def since(self, before: "Counters") -> "Counters":
        return Counters(self.requests - before.requests, self.bytes - before.bytes)


class Store(NamedTuple):
    """A running store."""

    endpoint: str  # URL of the store, without a trailing slash

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which boto3, s3fs and MosaicML streaming read from the store."""
        keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.endpoint, "S3_ENDPOINT_URL": self.endpoint}

    def counters(self) -> Counters:
        with urlopen(f"{self.endpoint}/?counters") as answer:
            return Counters(*json.load(answer))


@contextmanager
def object_store(folder: Path, latency_ms: float, bandwidth_mb: float) -> Iterator[Store]:
    """Serve `folder` in a separate process during the block.

    Args:
        latency_ms: milliseconds before each answer.
        bandwidth_mb: MB per second that all connections share; 0 for no limit.
    """
    options = [f"--latency-ms={latency_ms}", f"--bandwidth-mb={bandwidth_mb}"]
    command = [sys.executable, str(Path(__file__)), str(folder), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Store(process.stdout.readline().strip())
        finally:
            process.terminate()


class _Link:
    """Token bucket that limits the bandwidth of all connections together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Block until `size` bytes may be sent."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST) + size / self._rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # pending connections; with the default of 5, clients retry further ones after a second

    def __init__(self, folder: Path, latency: float, link: _Link) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder.resolve()
        self.latency = latency
        self.link = link
        self._lock = threading.Lock()
        self.counters = Counters(0, 0)

    def count(self, requests: int, size: int) -> None:
        with self._lock:
            self.counters = Counters(self.counters.requests + requests, self.counters.bytes + size)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close a connection early, as they do once a measurement ends."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        if self.path == "/?counters":
            self._send(200, json.dumps(self.server.counters).encode(), "application/json")
            return
        self._answer()

    def _answer(self) -> None:
        self.server.count(1, 0)
        time.sleep(self.server.latency)
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).strip("/").partition("/")
        folder = self.server.folder / bucket
        if not key and folder.is_dir():
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            listing = _listing(folder, query.get("prefix", ""), query.get("delimiter", ""))
            self._send(200, listing.encode(), "application/xml")
            return
        file = (folder / key).resolve()
        if file.is_relative_to(folder) and file.is_file():
            self._send_file(file)
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", "application/xml")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self._send_headers(status, {"Content-Type": kind, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, file: Path) -> None:
        size = file.stat().st_size
        first = 0
        last = size - 1
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if requested:
            first = int(requested[1])
            last = min(int(requested[2] or size), size - 1)
        headers = {
            "Content-Length": str(last + 1 - first),
            "Accept-Ranges": "bytes",
            "ETag": f'"{size}"',
            "Last-Modified": _DATE,
            "Content-Type": "application/octet-stream",
        }
        if requested:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._send_headers(206 if requested else 200, headers)
        if self.command == "HEAD":
            return
        with file.open("rb", buffering=0) as opened:
            opened.seek(first)
            left = last + 1 - first
            while left > 0:
                piece = opened.read(min(_PIECE, left))
                if not piece:
                    break
                self.server.link.take(len(piece))
                self.wfile.write(piece)
                self.server.count(0, len(piece))
                left -= len(piece)

    def _send_headers(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def _listing(folder: Path, prefix: str, delimiter: str) -> str:
    """Return the XML of ListObjectsV2 for all matching keys in one page."""
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    keys = sorted(key for key in sizes if key.startswith(prefix))
    objects = ""
    folders = set()
    for key in keys:
        remainder = key[len(prefix) :]
        if delimiter and delimiter in remainder:
            folders.add(prefix + remainder.partition(delimiter)[0] + delimiter)
            continue
        objects += (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_ISO_DATE}</LastModified><Size>{sizes[key]}</Size>"
            f"<ETag>&quot;{sizes[key]}&quot;</ETag><StorageClass>STANDARD</StorageClass></Contents>"
        )
    prefixes = ""
    for name in sorted(folders):
        prefixes += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    return (
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(folder.name)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount>"
        f"<MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>{objects}{prefixes}</ListBucketResult>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder whose subfolders are the buckets")
    parser.add_argument("--latency-ms", type=float, default=50, help="milliseconds before each answer (default: 50)")
    parser.add_argument(
        "--bandwidth-mb", type=float, default=0, help="MB/s of all connections together (default: 0, no limit)"
    )
    options = parser.parse_args()
    server = _Server(options.folder, options.latency_ms / 1e3, _Link(options.bandwidth_mb * 1e6))
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # returns when the parent program ends, even if it is killed


if __name__ == "__main__":
    main()
