"""Read byte ranges of remote shards, and detect servers that do not support range requests."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import fsspec

from neuclip_ds.data.fetch import open_remote
from neuclip_ds.data.partial_shard import Range

log = logging.getLogger(__name__)

REQUESTS = 128  # maximum number of connections to a server
_SLOWEST = 100_000  # bytes per second; over a slower link, ranges time out, and whole shards are fetched instead


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """The URL of a file and its expected size in bytes."""

    url: str
    size: int


class RangesIgnored(OSError):
    """Raised if a server ignores ranges, or answers a request for a range with a different number of bytes."""


class RangeReader:
    """Reads ranges of bytes from remote shards; its methods may be called from any thread.

    Only backends that fsspec implements asynchronously (such as S3, GCS, Azure and HTTP) are used, because the others
    read ahead, and thus fetch many more bytes than requested.

    HTTP servers may ignore ranges and send the whole file. The first request to each HTTP server is therefore for one
    byte. If a server ignores that range or a later one, one warning is logged, and no more ranges are requested from
    the server.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._stores: dict[str, Any] = {}  # file systems by server
        self._servers_without_ranges: set[str] = set()

    def supports(self, url: str) -> bool:
        """Return whether ranges of the URL's file may be requested, as far as is known without a request."""
        if "::" in url or server_of(url) in self._servers_without_ranges:
            return False
        try:
            return bool(fsspec.get_filesystem_class(urlsplit(url).scheme).async_impl)
        except (ImportError, ValueError):  # no such backend; fetching the whole shard reports it
            return False

    def read(self, files: Sequence[RemoteFile], ranges: Sequence[Range]) -> list[bytes | BaseException]:
        """Return, for each pair of a file and a range, the bytes or the reason why they did not arrive.

        All files must be on one server; the ranges are requested simultaneously. The reason is RangesIgnored if a
        different number of bytes arrives, for example because the file has a different size. Raises RangesIgnored if
        the server ignores ranges, and an exception of the backend if the server cannot be checked or the requests take
        longer than the timeout, which grows with the number of bytes.
        """
        store = self._store(files[0])
        paths = [store._strip_protocol(file.url) for file in files]
        starts = [start for start, _ in ranges]
        ends = []
        for file, (_, end) in zip(files, ranges, strict=True):
            # at the end of the file, one more byte is requested, to notice a longer file
            ends.append(end + 1 if end == file.size else end)
        size = sum(end - start for start, end in ranges)
        limit = self._timeout + size / _SLOWEST  # for all requests together, not for the time without new bytes
        results = store.cat_ranges(paths, starts, ends, on_error="return", timeout=limit)
        checked: list[bytes | BaseException] = []
        for file, (start, end), result in zip(files, ranges, results, strict=True):
            if isinstance(result, bytes) and len(result) != end - start:
                if len(result) > end - start + 1:  # more than the byte that reveals a longer file
                    self._mark_as_without_ranges(server_of(file.url))
                result = RangesIgnored(f"{file.url}: {len(result)} bytes arrived for a range of {end - start}")
            checked.append(result)
        return checked

    def _store(self, file: RemoteFile) -> Any:
        """Return the file system of a file's server, which is opened and checked at its first use.

        Raises RangesIgnored if the server ignores ranges.
        """
        server = server_of(file.url)
        with self._mutex:  # other threads wait for the check
            if server in self._servers_without_ranges:
                raise RangesIgnored(f"{server} ignores ranges")
            if server not in self._stores:
                store, path = open_remote(file.url, self._timeout, connections=REQUESTS)
                if urlsplit(file.url).scheme in ("http", "https") and not _supports_ranges(store, path, file.size):
                    self._mark_as_without_ranges(server)
                    raise RangesIgnored(f"{server} ignores ranges")
                self._stores[server] = store
            return self._stores[server]

    def _mark_as_without_ranges(self, server: str) -> None:
        """Request no more ranges from a server, and log a warning."""
        if server not in self._servers_without_ranges:
            self._servers_without_ranges.add(server)
            log.warning("%s ignores range requests, so whole shards are fetched before their samples are used", server)


def server_of(url: str) -> str:
    """Return the scheme, the host (in S3, the bucket) and, if given, the port of a URL."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}"


def _supports_ranges(store: Any, path: str, size: int) -> bool:
    """Return whether an HTTP server can send only the second byte of a file; if it cannot, the file is not read."""
    with store.open(path, size=size, cache_type="none") as file:
        file.seek(1)
        try:
            file.read(1)
        except ValueError:  # fsspec raises it as soon as the headers of the answer show the whole file
            return False
    return True
