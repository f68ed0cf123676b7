"""Sample tables shared by all processes of a node: each is made once, as a file that they map into memory.

A worker's own tables would take 50 bytes and more a sample in every worker. Files are flat tables
(neuclip_ds/data/flat_table.py), named by the shard and by what the table was made from; the least recently used ones
make room. Where no file can be written, a table is private to its process.
"""

import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from neuclip_ds.data.flat_table import dump_table, view_table
from neuclip_ds.data.sample_table import SampleTable

log = logging.getLogger(__name__)

_LOCKS = 64  # lock files, which tables share


class NodeTables:
    """A folder of sample tables, at most `capacity_bytes` in all.

    Args:
        folder: created with the first table; private to this node. Whoever can write to it must be trusted with the
            data.
    """

    def __init__(self, folder: Path, capacity_bytes: int = 8 * 10**9) -> None:
        self._folder, self._capacity_bytes = folder, capacity_bytes
        self._warned = False

    def get(self, shard: str, source: Hashable, make: Callable[[], SampleTable]) -> SampleTable:
        """Return the table of a shard, mapped from its file; the first process to need it makes it.

        Args:
            shard: path or URL.
            source: what decides the table, with a `repr` that other processes agree on; one made from another source
                is not used.
            make: makes the table; what it raises is raised.
        """
        path = self._folder / f"{_hash(shard)}.{_hash(repr(source))}"
        with suppress(OSError, ValueError):
            return _map(path)
        with ExitStack() as stack:
            with suppress(OSError):  # without locks a table may be made twice
                stack.enter_context(self._locked(path))
            with suppress(OSError, ValueError):
                return _map(path)  # another process has made it meanwhile
            table = make()
            try:
                self._write(path, dump_table(table))
                return _map(path)
            except OSError as error:
                if not self._warned:
                    log.warning("sample tables cannot be shared between processes, which takes more memory: %s", error)
                self._warned = True
                return table

    def discard(self, shard: str) -> None:
        """Remove the tables of a shard; processes that use them keep them."""
        for path in self._folder.glob(f"{_hash(shard)}.*"):
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold one of the lock files during the block; a killed process loses its locks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = self._folder / f".lock-{int(path.name[:8], 16) % _LOCKS:02d}"
        with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write(self, path: Path, data: bytes) -> None:
        self._make_room(len(data))
        temporary = path.with_suffix(f"{path.suffix}.{os.getpid()}")
        temporary.unlink(missing_ok=True)  # of a killed process with the same number
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used tables until one of `size` bytes fits."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        excess = sum(length for _, length, _ in files) + size - self._capacity_bytes
        for _, length, name in sorted(files):
            if excess <= 0:
                break
            if length:  # lock files are empty
                Path(name).unlink(missing_ok=True)
                excess -= length


def _map(path: Path) -> SampleTable:
    """Map a table; raise ValueError if it is damaged, OSError if it is absent or no file."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path} is no file")
    with pa.memory_map(str(path)) as file:
        buffer = file.read_buffer()  # stays mapped when the file is closed, and takes no file descriptor
    table = view_table(memoryview(buffer))
    with suppress(OSError):
        os.utime(path)  # counts as a use
    return table


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]
