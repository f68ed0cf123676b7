"""Sample tables as memory-mapped files, which all processes on a node share.

Private tables would take 50 bytes or more per sample in every worker. A file's name identifies the shard and the source
of the table. The least recently used files are removed to make room. If a file cannot be written, each process keeps a
private table.

A file begins with a 32-byte header: a magic string, the CRC-32 of all later bytes, `flags`, the sample count, and the
length of the keys in bytes. The arrays of `SampleTable` follow: extents, ordinals, optional checksums, and keys. The
names of members outside `MEMBERS` come last. `flags` is twice the number of these names, plus 1 if checksums exist.
"""

import hashlib
import logging
import os
import re
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from filelock import FileLock

from neuclip_ds.data.sample_table import MEMBERS, SampleTable

log = logging.getLogger(__name__)

_LOCKS = 64  # number of lock files; many tables share each file
_TABLES_PER_CHECK = 64  # space is checked for only one small table in this many, because the check lists all files
_MAGIC = b"NDStable"
_HEADER = struct.Struct("<8sIIqq")
_CACHED = re.compile(r"[0-9a-f]{24}[-.]")  # the names of cached shards and tables begin with a result of `name_of`
_SIGNED = 12  # offset of the first byte that the CRC-32 covers


class NodeTables:
    """A folder on this node for about `capacity_bytes` of sample tables, created when the first table is requested.

    Anyone who can write to the folder can change the data that ranks read.
    """

    def __init__(self, folder: Path, capacity_bytes: int = 8 * 10**9) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._warned = False

    def get(self, shard: str, source: Hashable, make: Callable[[], SampleTable]) -> SampleTable:
        """Return the table of a shard, mapped from its file; the first process that needs the table builds it.

        `source` identifies the data from which the table is built; its `repr` must be the same in all processes. A
        table that was built from a different source is not used. If the file cannot be written, the result is in this
        process's private memory.
        """
        path = self._folder / f"{name_of(shard)}.{name_of(repr(source))}"
        with suppress(OSError, ValueError):
            return _map(path)
        with ExitStack() as stack:
            with suppress(OSError):  # without locks, a table may be built twice
                self._folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(self._folder / f".lock-{int(path.name[:8], 16) % _LOCKS:02d}"))
            with suppress(OSError, ValueError):
                return _map(path)  # another process has built the table in the meantime
            table = make()
            try:
                self._write(path, dump_table(table))
                return _map(path)
            except OSError as error:
                if not self._warned:
                    log.warning(
                        "sample tables cannot be written to %s (%s), so the processes cannot share them and need more "
                        "memory; make room or give write permission there",
                        self._folder,
                        error,
                    )
                self._warned = True
                return table

    def discard(self, shard: str) -> None:
        """Remove the tables of a shard; processes that have mapped a table can still use it."""
        for path in self._folder.glob(f"{name_of(shard)}.*"):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a table; first make room for it if it is large, and for one in 64 small tables, chosen at random."""
        if len(data) * _TABLES_PER_CHECK > self._capacity_bytes or secrets.randbelow(_TABLES_PER_CHECK) == 0:
            remove_oldest(self._folder, self._capacity_bytes - len(data))
        temporary = path.with_suffix(f"{path.suffix}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def remove_oldest(folder: Path, most_bytes: int, counted: Collection[tuple[str, int]] = ()) -> None:
    """Remove the least recently used shards or tables of a folder until the others take at most `most_bytes`.

    `counted` contains the names (`name_of`) and sizes of shards that the caller has counted already; these shards are
    neither counted nor removed. Nor are other files in the folder, which may be the user's.
    """
    cached = []
    for path, status in files_in(folder):
        name, _, _ = path.name.partition("-")
        if _CACHED.match(path.name) and (name, status.st_size) not in counted:
            cached.append((status.st_mtime_ns, status.st_size, path))
    oldest_first = sorted(cached)
    excess = sum(size for _, size, _ in oldest_first) - most_bytes
    for _, size, path in oldest_first:
        if excess > 0:
            path.unlink(missing_ok=True)
            excess -= size


def files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of a folder with their stat results, skipping files that are removed during the iteration.

    Yields nothing if `folder` does not exist or is a file.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _map(path: Path) -> SampleTable:
    """Map a table into memory; raise ValueError if it is damaged, or OSError if it is absent or not a regular file."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path} is not a file")
    with pa.memory_map(str(path)) as file:
        buffer = file.read_buffer()  # stays mapped after the file is closed, without using a file descriptor
    table = view_table(memoryview(buffer))
    with suppress(OSError):
        os.utime(path)  # marks the table as used
    return table


def name_of(text: str) -> str:
    """Return a short hash of a string, for use as a file name."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def dump_table(table: SampleTable) -> bytes:
    """Serialize a table to bytes."""
    other_members = table.members[len(MEMBERS) :]
    names = "".join(f"\0{name}" for name in other_members).encode()
    has_checksums = table.crc32 is not None
    flags = has_checksums + 2 * len(other_members)
    header = _HEADER.pack(_MAGIC, 0, flags, table.n, len(table.keys))
    checksums = b"" if table.crc32 is None else table.crc32.tobytes()
    data = b"".join([header[_SIGNED:], table.extents.tobytes(), table.ordinals.tobytes(), checksums, table.keys, names])
    return _MAGIC + struct.pack("<I", zlib.crc32(data)) + data


def view_table(buffer: bytes | memoryview) -> SampleTable:
    """Return the table that `dump_table` serialized, as a view of `buffer`; raise ValueError if `buffer` is damaged."""
    view = memoryview(buffer)
    if len(view) < _HEADER.size:
        raise ValueError(f"a table of {len(view)} bytes is truncated")
    magic, crc32, flags, n, key_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or zlib.crc32(view[_SIGNED:]) != crc32:
        raise ValueError("a table is damaged: its header or checksum does not match")
    has_checksums = bool(flags & 1)
    member_count = len(MEMBERS) + (flags >> 1)
    offset = _HEADER.size
    extents = np.frombuffer(view, np.int64, n * member_count * 2, offset)
    offset += extents.nbytes
    ordinals = np.frombuffer(view, np.int32, n, offset)
    offset += ordinals.nbytes
    checksums = None
    if has_checksums:
        checksums = np.frombuffer(view, np.uint32, n * member_count, offset).reshape(n, member_count)
        offset += checksums.nbytes
    keys = view[offset : offset + key_bytes]
    other_members = bytes(view[offset + key_bytes :]).decode().split("\0")[1:]
    return SampleTable(
        ordinals=ordinals,
        extents=extents.reshape(n, member_count, 2),
        keys=keys,
        crc32=checksums,
        members=(*MEMBERS, *other_members),
    )
