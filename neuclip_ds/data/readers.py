"""Read the bytes of a sample by its global index.

Most readers run in loader workers. A reader opens a shard when it first reads a sample from the shard. It keeps
recently used shards open, but only one shard if there is a cache. Remote shards are read from the node's cache, even
while they are being fetched in pieces. If the manifest has checksums, every read is verified. If possible, all
processes on a node share the samples' offsets (node_tables.py).
"""

import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from io import FileIO
from typing import NamedTuple

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.decoders import JSON
from neuclip_ds.data.fetch import FetchError
from neuclip_ds.data.manifest import Manifest, check_size
from neuclip_ds.data.node_tables import NodeTables
from neuclip_ds.data.sample_table import MEMBERS, SampleTable, tabulate
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.tar import read_index
from neuclip_ds.data.uids import uid_of, uid_of_location
from neuclip_ds.errors import UserError, counted
from neuclip_ds.files import private_folder
from neuclip_ds.limits import open_files

log = logging.getLogger(__name__)

_MAX_READ = 512 << 20  # maximum bytes read at once; more than the largest image that is decoded
_MAX_HOLE = 16 << 10  # a gap of at most this many bytes between members is read rather than skipped
OPEN_SHARDS = 256  # maximum number of shards that a worker keeps open; fewer if few files may be open
_MAPPED_TABLES = 1 << 14  # maximum number of mapped tables per worker; Linux allows a process 65,530 mappings
_PRIVATE_TABLES = 1 << 10  # maximum number of tables in a worker's private memory, at 80 bytes per sample


class RawSample(NamedTuple):
    """The stored bytes of a sample: its image, if it has one, and the members that contain captions."""

    image: bytes | None
    texts: Mapping[str, bytes]


class SampleRange(NamedTuple):
    """The bytes start ... end - 1 of a shard, which contain all of a sample's members that are read."""

    shard: int
    start: int
    end: int


class ChecksumError(OSError):
    """Raised for bytes that do not match the manifest's checksum."""


class TooLarge(OSError):
    """Raised for a member that exceeds the size limit of a read."""


class TarReader:
    """A reader of tar members by offset. If the manifest has no offsets, they are read from the shards' headers.

    `texts` are the extensions of the members that contain captions. Raises UserError if a shard is remote and there is
    no cache.
    """

    def __init__(self, manifest: Manifest, texts: Sequence[str] = ("txt",), cache: ShardCache | None = None) -> None:
        if cache is None:
            remote = next((shard.path for shard in manifest.shards if not is_local(shard.path)), None)
            if remote is not None:
                raise UserError(f"Shard {remote} is remote: pass a cache to read it, or copy it to this machine.")
        self._manifest = manifest
        self._texts = tuple(texts)
        self._cache = cache
        self._whole_only: set[int] = set()  # shards that are not read before they have arrived completely
        self._node_tables = _node_tables(cache)
        most_tables = _MAPPED_TABLES if self._node_tables is not None else _PRIVATE_TABLES
        self._table = lru_cache(most_tables)(self._load_table)
        # an evicted shard occupies the disk until it is closed, so only one cached shard is open at a time
        most_shards = max(min(OPEN_SHARDS, open_files() // 4), 1)
        self._file = lru_cache(most_shards if cache is None else 1)(self._open)

    def read(self, index: int, with_image: bool = True) -> RawSample:
        """Return the bytes of a sample.

        Raises ChecksumError if the bytes are damaged, OSError if the read fails for any other reason, and UserError if
        the shard is not the one in the manifest, its sample table cannot be read, or `ShardCache.path` raises it.
        """
        shard, row = self._manifest.locate(index)
        table = self._table(shard)
        extents = table.extents[row].tolist()
        members = self._member_columns(table)
        if not with_image:
            members = members[1:]
        extents_to_read = [extents[member] for member in members]
        try:
            file = self._open_pieces(shard, extents_to_read) or self._file(shard)
            contents = _read_members(partial(read_at, file.fileno()), extents_to_read)
            if table.crc32 is not None:
                self._verify(shard, zip(members, contents, table.crc32[row, members].tolist(), strict=True))
        except OSError:
            # the next attempt must not use a stale file descriptor or damaged pieces
            self._file.cache_clear()
            self._whole_only.add(shard)
            raise
        image = contents.pop(0) if with_image else None
        texts = {name: text for name, text in zip(self._texts, contents, strict=True) if text is not None}
        return RawSample(image, texts)

    def prefetch_samples(self, indices: Iterable[int]) -> None:
        """Start concurrent reads of the given samples, except samples of remote shards.

        Without this call, each read waits for the disk. In one measurement (2026-11-22), reads of samples outside the
        page cache then took 2 to 4 times as long.
        """
        for index in indices:
            shard, row = self._manifest.locate(index)
            if self._is_copied(self._manifest.shards[shard].path):
                continue
            with suppress(OSError, UserError):  # `read` will raise the error
                table = self._table(shard)
                for offset, size in table.extents[row, self._member_columns(table)].tolist():
                    if size > 0:
                        os.posix_fadvise(self._file(shard).fileno(), offset, size, os.POSIX_FADV_WILLNEED)

    def byte_range(self, index: int) -> SampleRange | None:
        """Return the range of a sample's bytes; None if it is empty, or longer than one read allows (512 MiB).

        Raises UserError if the manifest's sample table cannot be read. The manifest must have sample tables, because
        other tables are made from whole shards.
        """
        shard, row = self._manifest.locate(index)
        table = self._table(shard)
        extents = table.extents[row, self._member_columns(table)]
        extents = extents[extents[:, 0] >= 0]  # members that the sample has
        if not len(extents):
            return None
        start = int(extents[:, 0].min())
        end = int(extents.sum(axis=1).max())
        if not 0 < end - start <= _MAX_READ:
            return None
        return SampleRange(shard, start, end)

    def key(self, index: int) -> str:
        """Return the key of a sample: the folder and the stem of its members' names.

        Raises OSError or UserError if the shard cannot be used.
        """
        shard, row = self._manifest.locate(index)
        return self._table(shard).key(row)

    def uid(self, index: int, key: str) -> tuple[int, int]:
        """Return a sample's uid: the one under `key` in its JSON or, if there is none, that of `uid_of_location`.

        The reader's `texts` must include json. Raises the same errors as `read`.
        """
        shard, row = self._manifest.locate(index)
        uid = uid_of(self.read(index, with_image=False).texts.get(JSON, b""), key)
        return uid or uid_of_location(self._manifest.shards[shard].path, self._table(shard).main_extents(row))

    def keys(self, shard: int, rows: slice) -> list[str]:
        """Return the keys of consecutive samples of a shard; raise OSError or UserError if the shard cannot be used."""
        keys = self._table(shard).split_keys()[rows]
        return [key.decode("utf-8", "replace") for key in keys]

    def _is_copied(self, path: str) -> bool:
        """Return whether a shard is read from the cache rather than in place."""
        return self._cache is not None and not is_local(path)

    def _open(self, shard: int) -> FileIO:
        """Open a shard; first fetch it if it is remote and not cached."""
        listed = self._manifest.shards[shard]
        if self._cache is None or not self._is_copied(listed.path):
            file = FileIO(listed.path)  # closed when the last reference is gone
            check_size(listed, os.fstat(file.fileno()).st_size)
            return file
        try:
            return self._cache.open(listed.path, listed.bytes, listed.crc32)
        except FetchError as error:
            if error.damaged and listed.layout is None:
                raise UserError(f"{error} The shard has changed; build the manifest again.") from error
            raise

    def _open_pieces(self, shard: int, extents: Iterable[Sequence[int]]) -> FileIO | None:
        """If a remote shard is being fetched in pieces, wait for the extents and open it; otherwise, return None."""
        listed = self._manifest.shards[shard]
        if self._cache is None or not self._is_copied(listed.path) or shard in self._whole_only:
            return None
        present = [(offset, size) for offset, size in extents if offset >= 0]
        return self._cache.open_arrived(listed.path, listed.bytes, present)

    def _load_table(self, shard: int) -> SampleTable:
        """Read a shard's table from the manifest, or make it from the shard's headers and check it."""
        listed = self._manifest.shards[shard]
        samples = self._manifest.samples
        if samples is not None:
            return self._shared_table(listed.path, samples.source(shard), partial(samples.table, shard))
        status = os.fstat(self._file(shard).fileno())
        other_members = [name for name in self._texts if name not in MEMBERS]
        source: tuple[object, ...] = (status.st_size, status.st_ino, *other_members)
        # the times of a cached copy change with every use; its tables are discarded when the shard is fetched again
        if not self._is_copied(listed.path):
            source += (status.st_mtime_ns, status.st_ctime_ns)
        table = self._shared_table(listed.path, source, partial(self._walk_headers, shard))
        self._check_layout(shard, table)
        if table.n != listed.n:
            cause = "the shard has changed. Build the manifest again, with or without this shard"
            if listed.layout is None:  # the samples were counted from a side file
                cause = (
                    "the shard has changed, or img2dataset's side file contains a wrong count. Build the manifest "
                    "again, without --from-side-files or without this shard"
                )
            raise UserError(
                f"Shard {listed.path} contains {counted(table.n, 'sample')}, but the manifest lists {listed.n}: "
                f"{cause}."
            )
        return table

    def _shared_table(self, path: str, source: tuple[object, ...], make: Callable[[], SampleTable]) -> SampleTable:
        """Return a table that all processes on the node share, if possible; `make` makes the table."""
        if self._node_tables is None:
            return make()
        return self._node_tables.get(path, source, make)

    def _walk_headers(self, shard: int) -> SampleTable:
        return tabulate(read_index(self._file(shard).fileno()).samples, self._texts)

    def _member_columns(self, table: SampleTable) -> list[int]:
        """Return the indices of the image and the texts among the table's members."""
        return [table.members.index(name) for name in ("image", *self._texts)]

    def _check_layout(self, shard: int, table: SampleTable) -> None:
        """Raise UserError if a shard has the right number of samples but not the samples that the manifest lists."""
        listed = self._manifest.shards[shard]
        if listed.layout not in (None, table.layout) and table.n == listed.n:
            raise UserError(
                f"Shard {listed.path} has the size that the manifest lists, but contains different samples: restore "
                "it, or build the manifest again."
            )

    def _verify(self, shard: int, members: Iterable[tuple[int, bytes | None, int]]) -> None:
        for member, data, expected in members:
            if data is not None and zlib.crc32(data) != expected:
                # a shard that was replaced by one with as many samples is a user error, not a bad sample
                self._check_layout(shard, self._walk_headers(shard))
                name = self._table(shard).members[member]
                raise ChecksumError(f"{name} does not match the checksum in the manifest")


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Read `size` bytes of a shard; raise OSError if the file is too short, or TooLarge if `size` exceeds 512 MiB."""
    if size > _MAX_READ:
        raise TooLarge(f"{size} bytes at offset {offset} are more than the limit of {_MAX_READ} bytes")
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise OSError(f"the shard is truncated: it has {len(data)} of {size} bytes at offset {offset}")
    return data


def _read_members(read: Callable[[int, int], bytes], extents: Sequence[Sequence[int]]) -> list[bytes | None]:
    """Read a sample's members, in one read if they are close together; return None for members with offset -1."""
    # the range of all members; comparisons instead of min() and max(), because this runs for every sample
    start = sys.maxsize
    end = 0
    total = 0
    for offset, size in extents:
        if offset >= 0:
            total += size
            if offset < start:
                start = offset
            if offset + size > end:
                end = offset + size
    if end - start > total + _MAX_HOLE:
        return [None if offset < 0 else read(offset, size) for offset, size in extents]
    data = read(start, end - start) if end else b""
    return [None if offset < 0 else data[offset - start : offset - start + size] for offset, size in extents]


def _node_tables(cache: ShardCache | None) -> NodeTables | None:
    """Return the node's tables in the cache or, without one, in a private folder; None if this folder is unusable."""
    if cache is not None:
        return cache.tables
    try:
        return NodeTables(private_folder("set TMPDIR to another folder") / "tables")
    except UserError as error:
        log.warning("sample tables are not shared between processes, so they take more memory. %s", error)
        return None
