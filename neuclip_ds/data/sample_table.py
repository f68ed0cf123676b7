"""Sample tables: the offsets, checksums and keys of a shard's samples, stored as Parquet, one row group per shard.

A manifest may contain these tables (`samples/part-*.parquet`). In that case, a shard can be opened without walking its
headers, every read is verified if checksums were computed, and the manifest may list only some of the shard's samples.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from neuclip_ds.data.tar import Extent, SampleEntry
from neuclip_ds.errors import UserError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")  # a sample's image is the first of these that it has
MEMBERS = ("image", "txt", "json")  # members that every table lists, before other members with captions
_NO_OFFSET = -1

# suffixes of the names of each member's columns
_OFFSET = "_offset"
_SIZE = "_size"
_CRC32 = "_crc32"
_UID = ("uid_high", "uid_low")


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleTable:
    """The n samples of a shard as arrays. With m = 3 members and no checksums, a sample takes 52 bytes plus its key."""

    ordinals: NDArray[np.int32]  # (n,) position among all samples of the tar
    extents: NDArray[np.int64]  # (n, m, 2) offset and size of each member; the offset is -1 if absent
    keys: bytes | memoryview  # joined by NUL, which no name contains; may be a view of a memory-mapped file
    crc32: NDArray[np.uint32] | None = None  # (n, m) checksums of the members; 0 if absent
    members: tuple[str, ...] = MEMBERS
    uids: NDArray[np.uint64] | None = None  # (n, 2) words of the uid in the JSON, 0 if absent; None in a loaded table

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.ordinals)

    @property
    def layout(self) -> int:
        """A checksum of all keys and of the extents of `MEMBERS`; it almost always differs between different shards."""
        return zlib.crc32(self.extents[:, : len(MEMBERS)].tobytes(), zlib.crc32(self.keys))

    def extent(self, row: int, member: str) -> Extent | None:
        """Return the extent of a sample's member, or None if the sample lacks the member."""
        offset, size = self.extents[row, self.members.index(member)].tolist()
        return None if offset == _NO_OFFSET else Extent(offset, size)

    def main_extents(self, row: int) -> NDArray[np.int64]:
        """Return the (3, 2) extents of a sample's `MEMBERS`, which identify the sample in its shard."""
        return self.extents[row, : len(MEMBERS)]

    def has(self, member: str) -> NDArray[np.bool_]:
        """Return a mask (n,) of the samples that have a member."""
        return self.extents[:, self.members.index(member), 0] != _NO_OFFSET

    def split_keys(self) -> list[bytes]:
        """Return the keys of all samples, as the bytes stored in the tar."""
        return bytes(self.keys).split(b"\0") if self.n else []

    def key(self, row: int) -> str:
        """Return the key of a sample; bytes that are not UTF-8 become surrogates."""
        return self.split_keys()[row].decode("utf-8", "surrogateescape")

    def take(self, rows: NDArray[np.int64]) -> SampleTable:
        """Return the table of the samples at `rows`, which may contain duplicates."""
        keys = self.split_keys()
        return SampleTable(
            ordinals=self.ordinals[rows],
            extents=self.extents[rows],
            keys=b"\0".join(keys[row] for row in rows.tolist()),
            crc32=None if self.crc32 is None else self.crc32[rows],
            members=self.members,
            uids=None if self.uids is None else self.uids[rows],
        )


def tabulate(samples: Sequence[SampleEntry], texts: Sequence[str] = ()) -> SampleTable:
    """Return the table of all samples of a shard; `texts` are the members that captions are read from."""
    members = (*MEMBERS, *(member for member in texts if member not in MEMBERS))
    absent = Extent(_NO_OFFSET, 0)
    extents = []  # a list for each sample, with the extent of each of `members`
    for entry in samples:
        by_extension = entry.members
        image = next((by_extension[name] for name in IMAGE_EXTENSIONS if name in by_extension), absent)
        others = [by_extension.get(member, absent) for member in members[1:]]
        extents.append([image, *others])
    return SampleTable(
        ordinals=np.arange(len(samples), dtype=np.int32),
        extents=np.array(extents, dtype=np.int64).reshape(len(samples), len(members), 2),
        keys=b"\0".join(entry.key.encode("utf-8", "surrogateescape") for entry in samples),
        members=members,
    )


def write_part(path: Path, tables: Iterable[SampleTable]) -> None:
    """Write one or more sample tables with the same members to a file, one row group per table."""
    remaining = iter(tables)
    first = next(remaining)
    schema = pa.schema([*_schema(first.members), *((name, pa.uint64()) for name in _UID)])
    encoding = dict.fromkeys(schema.names, "DELTA_BINARY_PACKED")
    for name in schema.names:
        if name.endswith(_CRC32) or name in _UID:  # random bits, which cannot be compressed
            encoding[name] = "PLAIN"
    encoding["key"] = "DELTA_BYTE_ARRAY"
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding=encoding,
        write_page_checksum=True,
    ) as writer:
        for table in itertools.chain([first], remaining):
            extents = table.extents.reshape(table.n, 2 * len(table.members)).T
            crc32 = [pa.nulls(table.n, pa.uint32())] * len(table.members)
            if table.crc32 is not None:
                crc32 = list(table.crc32.T)
            uids = [pa.nulls(table.n, pa.uint64())] * len(_UID)
            if table.uids is not None:
                uids = list(table.uids.T)
            columns = [table.split_keys(), table.ordinals, *extents, *crc32, *uids]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=max(1, table.n))


def _schema(members: Sequence[str]) -> pa.Schema:
    """Return the schema of a sample table, without its uids: keys, ordinals, extents, and checksums.

    Checksums are null if they were not computed.
    """
    columns: list[tuple[str, pa.DataType]] = [("key", pa.binary()), ("ordinal", pa.int32())]
    for member in members:
        columns.append((f"{member}{_OFFSET}", pa.int64()))
        columns.append((f"{member}{_SIZE}", pa.int64()))
    columns += [(f"{member}{_CRC32}", pa.uint32()) for member in members]
    return pa.schema(columns)


class TableLocation(NamedTuple):
    """The location of a shard's sample table."""

    file: Path
    row_group: int


class SampleTables:
    """The sample tables of several shards, stored at `locations`; `members` are the members that all tables list."""

    def __init__(self, locations: Sequence[TableLocation], members: frozenset[str]) -> None:
        self.locations = tuple(locations)
        self.members = members

    @classmethod
    def open(cls, locations: Sequence[TableLocation], sizes: Sequence[int]) -> SampleTables:
        """Open tables, reading only file footers.

        Raises UserError if a file cannot be read, or if a table is missing or has the wrong row count.
        """
        rows_of_groups: dict[Path, list[int]] = {}  # by file
        members: list[set[str]] = []  # members that the tables in each file list
        for path in dict.fromkeys(location.file for location in locations):
            with _opened(path) as file:
                groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
                rows_of_groups[path] = [group.num_rows for group in groups]
                members.append(set(_members_of(file.schema_arrow.names)))
        for location, size in zip(locations, sizes, strict=True):
            rows = rows_of_groups[location.file]
            if not 0 <= location.row_group < len(rows) or rows[location.row_group] != size:
                raise UserError(
                    f"The sample tables in {location.file} do not match the manifest; restore this file, or build the "
                    "manifest again."
                )
        return cls(locations, frozenset(set.intersection(*members) if members else MEMBERS))

    @classmethod
    def join(cls, several: Sequence[SampleTables]) -> SampleTables:
        """Concatenate the tables of several manifests."""
        locations = itertools.chain.from_iterable(tables.locations for tables in several)
        members = frozenset.intersection(*(tables.members for tables in several))
        return cls(tuple(locations), members)

    def table(self, shard: int) -> SampleTable:
        """Read a shard's table; raise UserError if it is missing or damaged."""
        location = self.locations[shard]
        with _opened(location.file) as file:
            return _to_table(file.read_row_group(location.row_group))

    def image_checksums(self) -> Iterator[NDArray[np.uint64]]:
        """Yield, file by file, a number for each image with a known CRC-32; identical images have equal numbers."""
        for _, (crc32, sizes) in self._columns(f"image{_CRC32}", f"image{_SIZE}"):
            yield ((sizes << np.uint64(32)) + crc32)[sizes > 0]

    def uids(self) -> Iterator[NDArray[np.uint64]]:
        """Yield, file by file, the uids that the samples' JSON contains, as (q, 2) arrays of 64-bit words.

        A sample that the manifest lists several times is counted once.
        """
        for shards, (ordinals, *words) in self._columns("ordinal", *_UID):
            uids = np.stack(words, axis=1)
            is_copy = np.zeros(len(uids), dtype=bool)  # copies of a sample are in consecutive rows
            is_copy[1:] = (shards[1:] == shards[:-1]) & (ordinals[1:] == ordinals[:-1])
            yield uids[uids.any(axis=1) & ~is_copy]

    def _columns(self, *names: str) -> Iterator[tuple[NDArray[np.int64], list[NDArray[np.uint64]]]]:
        """Yield, file by file, the number of each row's shard in the file, and the given columns as numbers.

        Files in which a value is missing are skipped.
        """
        for path, locations in groupby(sorted(self.locations), key=attrgetter("file")):
            row_groups = [location.row_group for location in locations]
            with _opened(path) as file:
                columns = file.read_row_groups(row_groups, names).columns
                sizes = [file.metadata.row_group(number).num_rows for number in row_groups]
            if not any(column.null_count for column in columns):
                shards = np.repeat(np.arange(len(sizes)), sizes)
                yield shards, [column.to_numpy().astype(np.uint64) for column in columns]

    def source(self, shard: int) -> tuple[object, ...]:
        """Return the identity of a shard's table: the file's path, size and modification time, and the row group.

        Raises UserError if the file cannot be accessed.
        """
        location = self.locations[shard]
        try:
            status = location.file.stat()
        except OSError as error:
            raise _unreadable(location.file, error) from error
        return str(location.file.absolute()), status.st_size, status.st_mtime_ns, location.row_group


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file of sample tables; raise UserError if it cannot be opened, or if a read in the `with` block fails."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"The manifest's file {path} cannot be read ({reason}); restore it, or build the manifest again.")


def _members_of(column_names: Sequence[str]) -> list[str]:
    """Return the members that have columns in a sample table."""
    return [name.removesuffix(_OFFSET) for name in column_names if name.endswith(_OFFSET)]


def _to_table(rows: pa.Table) -> SampleTable:
    """Convert the rows of a file; raise ValueError if values are missing or impossible."""
    others = [name for name in _members_of(rows.column_names) if name not in MEMBERS]
    members = (*MEMBERS, *others)
    schema = _schema(members)
    keys, ordinals, *columns = rows.select(schema.names).cast(schema).columns
    extent_columns = columns[: 2 * len(members)]
    checksum_columns = columns[2 * len(members) :]
    problem = "it has rows with missing or invalid values"
    if any(column.null_count for column in (keys, ordinals, *extent_columns)):
        raise ValueError(problem)
    extents = np.stack([_to_numpy(column) for column in extent_columns], axis=1)
    if (extents < _NO_OFFSET).any():
        raise ValueError(problem)
    crc32 = None
    if not any(column.null_count for column in checksum_columns):
        crc32 = np.stack([_to_numpy(column) for column in checksum_columns], axis=1)
    return SampleTable(
        ordinals=_to_numpy(ordinals),
        extents=extents.reshape(len(rows), len(members), 2),
        keys=b"\0".join(keys.to_pylist()),
        crc32=crc32,
        members=members,
    )


def _to_numpy(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column of numbers without nulls as an array; pyarrow's `to_numpy` would import pandas, which is slow."""
    return np.from_dlpack(column.combine_chunks())
