"""Read the bytes of a sample by its global index.

Readers run in loader workers. A reader opens a shard when it first reads a sample from the shard, and keeps recently
used shards open. Remote shards are read from the node's cache, except as `TarReader.prefetch_samples` describes. If the
manifest has checksums, every read is verified. All processes on a node share the samples' offsets (node_tables.py).
"""

import logging
import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from io import FileIO
from typing import NamedTuple

import fsspec

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.decoders import JSON
from neuclip_ds.data.fetch import FetchError, open_remote
from neuclip_ds.data.manifest import Manifest, check_size
from neuclip_ds.data.node_tables import NodeTables
from neuclip_ds.data.sample_table import MEMBERS, SampleTable, tabulate
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.tar import read_index
from neuclip_ds.data.uids import uid_of, uid_of_place
from neuclip_ds.errors import UserError
from neuclip_ds.files import private_folder

log = logging.getLogger(__name__)

_MAX_READ = 512 << 20  # maximum bytes read at once; more than the largest image that is decoded
_MAX_HOLE = 16 << 10  # a gap of at most this many bytes between members is read rather than skipped
MANY_BYTES = 2 << 30  # if the uncached shards of a batch total this many bytes, its samples are fetched individually
OPEN_SHARDS = 256  # maximum number of shards that a worker keeps open
_MAPPED_TABLES = 1 << 14  # maximum number of mapped tables per worker; Linux allows a process 65,530 mappings
_PRIVATE_TABLES = 1 << 10  # maximum number of tables in a worker's private memory, at 80 bytes per sample


class RawSample(NamedTuple):
    """The stored bytes of a sample: its image, if it has one, and the members that contain captions."""

    image: bytes | None
    texts: Mapping[str, bytes]


class ChecksumError(OSError):
    """Raised for bytes that do not match the manifest's checksum."""


class TooLarge(OSError):
    """Raised for a member that exceeds the size limit of a read."""


class TarReader:
    """A reader of tar members by offset. If the manifest has no offsets, each node walks each shard's headers once.

    `texts` are the members that contain captions. Raises UserError if a shard is remote and there is no cache.
    """

    def __init__(self, manifest: Manifest, texts: Sequence[str] = ("txt",), cache: ShardCache | None = None) -> None:
        remote = [shard.path for shard in manifest.shards if not is_local(shard.path)] if cache is None else []
        if remote:
            raise UserError(f"Shard {remote[0]} is remote and needs a cache; set data.cache_dir.")
        self._manifest, self._texts, self._cache = manifest, tuple(texts), cache
        self._apart = dict[int, tuple[int, bytes]]()  # by index: an offset in the shard, and the bytes from there on
        self._has_ranges = manifest.samples is not None
        self._node_tables = _node_tables(cache)
        self._table = lru_cache(_MAPPED_TABLES if self._node_tables is not None else _PRIVATE_TABLES)(self._load_table)
        # an evicted shard occupies the disk until it is closed, so only one cached shard is open at a time
        self._file = lru_cache(OPEN_SHARDS if cache is None else 1)(self._open)

    def read(self, index: int, with_image: bool = True) -> RawSample:
        """Return the bytes of a sample.

        Raises ChecksumError if the bytes are damaged, OSError if the read fails for any other reason, and UserError if
        the shard is not the one in the manifest.
        """
        shard, row = self._manifest.locate(index)
        table = self._table(shard)
        extents = table.extents[row].tolist()
        members = self._places(table)[0 if with_image else 1 :]
        try:
            part = self._apart.pop(index, None)  # a second attempt reads the shard instead
            source = partial(read_at, self._file(shard).fileno()) if part is None else partial(_cut, *part)
            found = _read_members(source, [extents[member] for member in members])
            if table.crc32 is not None:
                self._verify(shard, zip(members, found, table.crc32[row, members].tolist(), strict=True))
        except OSError:
            self._file.cache_clear()  # the next attempt must not use a stale file descriptor
            raise
        image = found.pop(0) if with_image else None
        return RawSample(image, {name: text for name, text in zip(self._texts, found, strict=True) if text is not None})

    def prefetch_samples(self, indices: Iterable[int]) -> None:
        """Start reading all of the given samples concurrently.

        This makes cold reads of local shards 2 to 4 times faster. If the manifest has offsets and the uncached remote
        shards total 2 GiB or more, their samples are fetched individually, so that no batch waits for whole shards.
        """
        self._apart, copied = {}, list[tuple[int, int, int]]()
        for index in indices:
            shard, row = self._manifest.locate(index)
            if self._is_copied(self._manifest.shards[shard].path):
                copied.append((index, shard, row))
                continue
            with suppress(OSError, UserError):  # `read` will raise the error
                table = self._table(shard)
                for offset, size in table.extents[row, self._places(table)].tolist():
                    if size > 0:
                        os.posix_fadvise(self._file(shard).fileno(), offset, size, os.POSIX_FADV_WILLNEED)
        if copied and self._has_ranges:
            with suppress(OSError, UserError):
                self._fetch_apart(copied)

    def _fetch_apart(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Fetch the samples (index, shard, row) of uncached shards individually if these shards total 2 GiB or more."""
        assert self._cache is not None
        shards = {number: self._manifest.shards[number] for number in {shard for _, shard, _ in rows}}
        if sum(shard.bytes for shard in shards.values()) < MANY_BYTES:
            return
        absent = {n for n, shard in shards.items() if not self._cache.touch(shard.path, shard.bytes)}
        if sum(shards[number].bytes for number in absent) < MANY_BYTES:
            return
        by_storage = defaultdict[str, dict[int, tuple[str, int, int]]](dict)
        for index, number, row in rows:
            path = shards[number].path
            if number in absent and "::" not in path:
                table = self._table(number)
                places = table.extents[row, self._places(table)]
                places = places[places[:, 0] >= 0]
                start, end = (int(places[:, 0].min()), int(places.sum(axis=1).max())) if len(places) else (0, 0)
                if 0 < end - start <= _MAX_READ:
                    by_storage[path.partition(":")[0]][index] = path, start, end
        for wanted in by_storage.values():
            parts = _fetch_ranges(list(wanted.values()), self._cache.timeout)
            self._has_ranges = any(part is not None for part in parts)  # if none arrived, do not wait again
            for (index, (_, start, _)), part in zip(wanted.items(), parts, strict=True):
                if part is not None:
                    self._apart[index] = start, part

    def key(self, index: int) -> str:
        """Return the key of a sample: the folder and the stem of its members' names."""
        shard, row = self._manifest.locate(index)
        return self._table(shard).key(row)

    def uid(self, index: int, key: str) -> tuple[int, int]:
        """Return a sample's uid from `key` in its JSON or else from `uid_of_place`; raise the same errors as `read`."""
        shard, row = self._manifest.locate(index)
        found = uid_of(self.read(index, with_image=False).texts.get(JSON, b""), key)
        return found or uid_of_place(self._manifest.shards[shard].path, self._table(shard).place(row))

    def keys(self, shard: int, rows: slice) -> list[str]:
        """Return the keys of consecutive samples of a shard; raise OSError or UserError if the shard cannot be used."""
        found = self._table(shard).split_keys()[rows]
        return [key.decode("utf-8", "replace") for key in found]

    def _is_copied(self, path: str) -> bool:
        """Return whether a shard is read from the cache rather than in place."""
        return self._cache is not None and not is_local(path)

    def _open(self, shard: int) -> FileIO:
        described = self._manifest.shards[shard]
        if self._cache is None or not self._is_copied(described.path):
            file = FileIO(described.path)  # closed when the last reference is gone
            check_size(described, os.fstat(file.fileno()).st_size)
            return file
        try:
            return self._cache.open(described.path, described.bytes, described.crc32)
        except FetchError as error:
            if error.damaged and described.layout is None:
                raise UserError(f"{error} It has changed; build the manifest again.") from error
            raise

    def _load_table(self, shard: int) -> SampleTable:
        described, samples = self._manifest.shards[shard], self._manifest.samples
        if samples is not None:
            return self._shared(described.path, samples.source(shard), partial(samples.table, shard))
        status = os.fstat(self._file(shard).fileno())
        others = [name for name in self._texts if name not in MEMBERS]
        source: tuple[object, ...] = (status.st_size, status.st_ino, *others)
        # the times of a cached copy change with every use; its tables are discarded when the shard is fetched again
        if not self._is_copied(described.path):
            source += (status.st_mtime_ns, status.st_ctime_ns)
        table = self._shared(described.path, source, partial(self._walk, shard))
        self._check_layout(shard, table)
        if table.n != described.n:
            counted = "" if described.layout is not None else ", or img2dataset's side file has a wrong count"
            raise UserError(
                f"Shard {described.path} yields {table.n} samples where the manifest has {described.n}: it has "
                f"changed{counted}; build the manifest again, or without the shard."
            )
        return table

    def _shared(self, path: str, source: tuple[object, ...], make: Callable[[], SampleTable]) -> SampleTable:
        return make() if self._node_tables is None else self._node_tables.get(path, source, make)

    def _walk(self, shard: int) -> SampleTable:
        return tabulate(read_index(self._file(shard).fileno()).samples, self._texts)

    def _places(self, table: SampleTable) -> list[int]:
        """Return the indices of the image and the texts among the table's members."""
        return [table.members.index(name) for name in ("image", *self._texts)]

    def _check_layout(self, shard: int, table: SampleTable) -> None:
        """Raise UserError if a shard has the right number of samples but not the samples that the manifest lists."""
        described = self._manifest.shards[shard]
        if described.layout not in (None, table.layout) and table.n == described.n:
            raise UserError(
                f"Shard {described.path} has the size in the manifest but different samples; restore the shard."
            )

    def _verify(self, shard: int, members: Iterable[tuple[int, bytes | None, int]]) -> None:
        for member, data, expected in members:
            if data is not None and zlib.crc32(data) != expected:
                self._check_layout(shard, self._walk(shard))  # a replaced shard is a user error, not a bad sample
                name = self._table(shard).members[member]
                raise ChecksumError(f"{name} does not match the checksum in the manifest")


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Read `size` bytes of a shard; raise OSError if the file is too short, or TooLarge if `size` exceeds 512 MiB."""
    if size > _MAX_READ:
        raise TooLarge(f"{size} bytes at offset {offset} are more than the limit of {_MAX_READ}")
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise OSError(f"{len(data)} of {size} bytes at offset {offset}: the shard is truncated")
    return data


def _fetch_ranges(ranges: Sequence[tuple[str, int, int]], timeout: float) -> list[bytes | None]:
    """Fetch all (URL, start, end) ranges concurrently; return None for ranges that fail or exceed `timeout` seconds."""
    found: list[bytes | None] = [None] * len(ranges)

    def run() -> None:
        with suppress(Exception):  # backends raise many types
            fs, _ = open_remote(ranges[0][0], timeout)
            paths, starts, ends = map(list, zip(*ranges, strict=True))
            parts = fs.cat_ranges([fsspec.core.strip_protocol(path) for path in paths], starts, ends, on_error="return")
            for number, (part, start, end) in enumerate(zip(parts, starts, ends, strict=True)):
                if isinstance(part, bytes) and len(part) == end - start:
                    found[number] = part

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    return list(found)


def _cut(begin: int, part: bytes, offset: int, size: int) -> bytes:
    """Return the `size` bytes at `offset` in a shard; `part` contains the shard's bytes starting at offset `begin`."""
    return part[offset - begin : offset - begin + size]


def _read_members(read: Callable[[int, int], bytes], extents: Sequence[Sequence[int]]) -> list[bytes | None]:
    """Read a sample's members, in one read if they are close together; return None for members with offset -1."""
    start, end, size = sys.maxsize, 0, 0
    for offset, length in extents:
        if offset >= 0:
            size += length
            start = offset if offset < start else start
            end = offset + length if offset + length > end else end
    if end - start > size + _MAX_HOLE:
        return [None if offset < 0 else read(offset, length) for offset, length in extents]
    data = read(start, end - start) if end else b""
    return [None if at < 0 else data[at - start : at - start + length] for at, length in extents]


def _node_tables(cache: ShardCache | None) -> NodeTables | None:
    """Return the node's tables, stored in the cache or this user's private folder; None if that folder is unsafe."""
    if cache is not None:
        return cache.tables
    try:
        return NodeTables(private_folder() / "tables")
    except UserError as error:
        log.warning("sample tables are not shared between processes, so they take more memory: %s", error)
        return None
