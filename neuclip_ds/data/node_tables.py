"""Sample tables shared by all processes of a node: each is built once, as a file that they map into memory.

Private tables would take 50 bytes and more per sample in every worker. Files are named after the shard and what the
table was made from; the least recently used ones make room. If no file can be written, a table is private to its
process.

A file has a header of 32 bytes (magic, CRC-32 of all that follows, flags, n, bytes of the keys), and the arrays of
`SampleTable`: extents, ordinals, checksums or none, keys, and at the end the names of the members that are not in
`MEMBERS`. The lowest bit of the flags says whether there are checksums, the others hold the number of those members.
"""

import hashlib
import logging
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock

from neuclip_ds.data.sample_table import MEMBERS, SampleTable

log = logging.getLogger(__name__)

_LOCKS = 64  # lock files, which tables share
_TURNS = 64  # one small table in this many checks the free space, because there may be thousands of files
_MAGIC = b"NDStable"
_HEADER = struct.Struct("<8sIIqq")
_SIGNED = 12  # bytes before those that the CRC-32 covers


class NodeTables:
    """A folder of sample tables, at most `capacity_bytes` in all; private to this node, created with the first table.

    Anyone who can write to it can change the data.
    """

    def __init__(self, folder: Path, capacity_bytes: int = 8 * 10**9) -> None:
        self._folder, self._capacity_bytes = folder, capacity_bytes
        self._warned = False

    def get(self, shard: str, source: Hashable, make: Callable[[], SampleTable]) -> SampleTable:
        """Return the table of a shard, mapped from its file; the first process that needs it builds it.

        `source` identifies what the table is made from, by a `repr` that is the same in all processes: a table of
        another source is not used.
        """
        path = self._folder / f"{name_of(shard)}.{name_of(repr(source))}"
        with suppress(OSError, ValueError):
            return _map(path)
        with ExitStack() as stack:
            with suppress(OSError):  # without locks a table may be made twice
                self._folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(self._folder / f".lock-{int(path.name[:8], 16) % _LOCKS:02d}"))
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
        for path in self._folder.glob(f"{name_of(shard)}.*"):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a table, after removing the least recently used ones if there is no room."""
        if len(data) * _TURNS > self._capacity_bytes or secrets.randbelow(_TURNS) == 0:
            files = sorted((status.st_mtime_ns, status.st_size, path) for path, status in files_in(self._folder))
            excess = sum(size for _, size, _ in files) + len(data) - self._capacity_bytes
            for _, size, other in files:
                if excess > 0 and size:  # lock files are empty
                    other.unlink(missing_ok=True)
                    excess -= size
        temporary = path.with_suffix(f"{path.suffix}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of a folder with their status, unless they vanish meanwhile."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _map(path: Path) -> SampleTable:
    """Map a table; raise ValueError if it is damaged, OSError if it is absent or not a file."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path} is not a file")
    with pa.memory_map(str(path)) as file:
        buffer = file.read_buffer()  # stays mapped when the file is closed, and takes no file descriptor
    table = view_table(memoryview(buffer))
    with suppress(OSError):
        os.utime(path)  # counts as a use
    return table


def name_of(text: str) -> str:
    """Return a short file name that stands for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def dump_table(table: SampleTable) -> bytes:
    """Return the bytes of a table."""
    crc32 = b"" if table.crc32 is None else table.crc32.tobytes()
    others = table.members[len(MEMBERS) :]
    header = _HEADER.pack(_MAGIC, 0, (table.crc32 is not None) + 2 * len(others), table.n, len(table.keys))
    names = "".join(f"\0{name}" for name in others).encode()
    data = b"".join([header[_SIGNED:], table.extents.tobytes(), table.ordinals.tobytes(), crc32, table.keys, names])
    return _MAGIC + struct.pack("<I", zlib.crc32(data)) + data


def view_table(buffer: bytes | memoryview) -> SampleTable:
    """Return the table whose bytes are in `buffer`, without copying them; raise ValueError if they are damaged."""
    view = memoryview(buffer)
    if len(view) < _HEADER.size:
        raise ValueError(f"a table of {len(view)} bytes is truncated")
    magic, crc32, flags, n, key_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or zlib.crc32(view[_SIGNED:]) != crc32:
        raise ValueError("a table differs from its checksum")
    has_checksums, count, end = flags & 1, len(MEMBERS) + (flags >> 1), _HEADER.size
    arrays: list[Any] = []
    for dtype, length in ((np.int64, n * count * 2), (np.int32, n), (np.uint32, n * count * has_checksums)):
        arrays.append(np.frombuffer(view, dtype, length, end))
        end += arrays[-1].nbytes
    extents, ordinals, checksums = arrays
    keys, others = view[end : end + key_bytes], bytes(view[end + key_bytes :]).decode().split("\0")[1:]
    crc32s = checksums.reshape(n, count) if has_checksums else None
    return SampleTable(ordinals, extents.reshape(n, count, 2), keys, crc32s, (*MEMBERS, *others))
