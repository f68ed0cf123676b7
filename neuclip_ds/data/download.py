"""Download one URL with fsspec; large files in ranges where the number of bytes is known."""

import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import fsspec

from neuclip_ds.data.failures import FailureKind, TransferFailure

_HTTP = ("http://", "https://")
_RANGED = (*_HTTP, "s3://", "gs://", "gcs://")
_STREAMS = 4  # ranges of a file that are downloaded at the same time
_RANGES_ABOVE = 4 << 20  # bytes of a file
_SMALLEST, _LARGEST = 1 << 20, 8 << 20  # bytes of a range, which backends keep in memory until it is complete
_QUICK = 0.5  # seconds; the next range is twice as long where one took less


def download(url: str, target: Path, timeout: float, size: int | None) -> None:
    """Download a URL to the file `target`, which must not exist.

    Threads may still run when this raises: end the process.

    Args:
        timeout: seconds without a byte after which the caller kills this process.
        size: bytes that are expected, if known.

    Raises:
        Exception: of the backend, of any type.
    """
    fs, path = fsspec.core.url_to_fs(url, **_options(url, timeout))
    target.touch(exist_ok=False)  # the timeout starts here: backends can take seconds to import
    if size is not None and size > _RANGES_ABOVE and url.startswith(_RANGED):
        _Ranges(fs, path, target, size).download()
    else:
        fs.get_file(path, str(target))


def _options(url: str, timeout: float) -> dict[str, Any]:
    """Return options of the file system that stream the file without a limit on the total time."""
    if url.startswith(_HTTP):
        import aiohttp

        # aiohttp ends every transfer after five minutes by default; `fetch` detects stalls
        return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_connect=2 * timeout, sock_read=2 * timeout)}}
    if url.startswith("s3://"):
        return {"max_concurrency": 1}  # by default it holds ten parts of 50 MB in memory
    return {}


class _Ranges:
    """Download of a file of known size in several ranges at a time.

    Ranges start at 1 MB and double up to 8 MB while one takes less than half a second, so that progress stays visible
    on slow connections.
    """

    def __init__(self, fs: Any, path: str, target: Path, size: int) -> None:
        self._fs, self._path, self._target, self._size = fs, path, target, size
        self._lock = threading.Lock()
        self._next, self._length = 0, _SMALLEST

    def download(self) -> None:
        """Download the file; one stream where the server ignores ranges, which the first of them shows."""
        with self._target.open("r+b", buffering=0) as file:
            first = self._take()
            assert first is not None
            if self._read(file.fileno(), *first, whole=True) == self._size:
                return
            pool = ThreadPoolExecutor(_STREAMS)
            threads = [pool.submit(self._read_all, file.fileno()) for _ in range(_STREAMS)]
            for ended in wait(threads, return_when=FIRST_EXCEPTION).done:
                ended.result()

    def _read_all(self, fd: int) -> None:
        """Download ranges until none is left, in a thread."""
        while (piece := self._take()) is not None:
            began = time.monotonic()
            self._read(fd, *piece)
            if time.monotonic() - began < _QUICK:
                with self._lock:
                    self._length = min(max(self._length, 2 * (piece[1] - piece[0])), _LARGEST)

    def _take(self) -> tuple[int, int] | None:
        """Return begin and end of the next range."""
        with self._lock:
            start = self._next
            self._next = min(start + self._length, self._size)
            return (start, self._next) if start < self._next else None

    def _read(self, fd: int, start: int, end: int, whole: bool = False) -> int:
        """Download a range into its place and return its bytes; with `whole`, those of the whole file are right too."""
        sink = _Sink(fd, start, self._size if whole else end)
        stop = end + (end == self._size)  # one byte more than there should be, by which a longer file shows
        if self._path.startswith(_HTTP):
            headers = {**self._fs.kwargs.get("headers", {}), "Range": f"bytes={start}-{stop - 1}"}
            self._fs.get_file(self._path, sink, headers=headers)  # a stream, unlike `cat_file`
        else:
            sink.write(self._fs.cat_file(self._path, start=start, end=stop))
        if sink.written != end - start and not (whole and sink.written == self._size):
            raise TransferFailure(f"{sink.written} bytes arrived of a range of {end - start}", FailureKind.DAMAGED)
        return sink.written


class _Sink:
    """File-like object that writes to a place in a file, up to a limit.

    Attributes:
        written: bytes so far.
    """

    def __init__(self, fd: int, start: int, limit: int) -> None:
        self._fd, self._start, self._limit = fd, start, limit
        self.written = 0

    def write(self, data: bytes) -> int:
        if self.tell() + len(data) > self._limit:
            raise TransferFailure(
                f"more than the {self._limit - self._start} bytes of a range arrived", FailureKind.DAMAGED
            )
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, self.tell())
            self.written, view = self.written + count, view[count:]
        return len(data)

    def read(self) -> bytes:
        raise NotImplementedError  # fsspec recognises file-like objects by `read`, `close` and `tell`

    def close(self) -> None:
        """Do nothing: the file is used by other ranges."""

    def tell(self) -> int:
        return self._start + self.written
