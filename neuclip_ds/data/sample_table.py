"""Sample tables: the offsets, checksums and keys of a shard's samples, stored as Parquet, one row group per shard.

A manifest may contain these tables (`samples/part-*.parquet`). In that case, a shard can be opened without walking its
headers, every read is compared with its checksum (if one was computed), and the manifest may list only some of the
shard's samples.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from neuclip_ds.data.tar import Extent, SampleEntry
from neuclip_ds.errors import UserError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")  # a sample's image is the first of these that it has
MEMBERS = ("image", "txt", "json")  # members that every table lists, before other members with captions
_NO_OFFSET = -1

_OFFSET, _CRC32 = "_offset", "_crc32"  # suffixes of the names of each member's columns
_UID = ("uid_high", "uid_low")


class SampleTable(NamedTuple):
    """The n samples of a shard, as arrays: 52 bytes each plus the key for m = 3 members (600 as Python objects)."""

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
        """A checksum of all keys and of the extents of `MEMBERS`; it almost always differs between two shards."""
        return zlib.crc32(self.extents[:, : len(MEMBERS)].tobytes(), zlib.crc32(self.keys))

    def extent(self, row: int, member: str) -> Extent | None:
        """Return the extent of a sample's member, or None if the sample lacks the member."""
        offset, size = self.extents[row, self.members.index(member)].tolist()
        return None if offset == _NO_OFFSET else Extent(offset, size)

    def place(self, row: int) -> NDArray[np.int64]:
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
        chosen = b"\0".join(keys[row] for row in rows.tolist())
        crc32 = None if self.crc32 is None else self.crc32[rows]
        uids = None if self.uids is None else self.uids[rows]
        return SampleTable(self.ordinals[rows], self.extents[rows], chosen, crc32, self.members, uids)


def tabulate(samples: Sequence[SampleEntry], texts: Sequence[str] = ()) -> SampleTable:
    """Return the table of all samples of a shard; `texts` are the members that captions are read from."""
    members = (*MEMBERS, *(member for member in texts if member not in MEMBERS))
    absent, extents = Extent(_NO_OFFSET, 0), []
    for found in (entry.members for entry in samples):
        image = next((found[extension] for extension in IMAGE_EXTENSIONS if extension in found), absent)
        extents.append([image, *(found.get(member, absent) for member in members[1:])])
    return SampleTable(
        np.arange(len(samples), dtype=np.int32),
        np.array(extents, dtype=np.int64).reshape(len(samples), len(members), 2),
        b"\0".join(entry.key.encode("utf-8", "surrogateescape") for entry in samples),
        members=members,
    )


def write_part(path: Path, tables: Iterable[SampleTable]) -> None:
    """Write sample tables with the same members to a file, one row group per table."""
    remaining = iter(tables)
    first = next(remaining)
    schema = pa.schema([*_schema(first.members), *((name, pa.uint64()) for name in _UID)])
    encoding = {
        name: "PLAIN" if name.endswith(_CRC32) or name in _UID else "DELTA_BINARY_PACKED" for name in schema.names
    }
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding={**encoding, "key": "DELTA_BYTE_ARRAY"},
        write_page_checksum=True,
    ) as writer:
        for table in itertools.chain([first], remaining):
            unknown = [pa.nulls(table.n, pa.uint32())] * len(table.members)
            crc32 = unknown if table.crc32 is None else list(table.crc32.T)
            extents = table.extents.reshape(table.n, 2 * len(table.members)).T
            uids = [pa.nulls(table.n, pa.uint64())] * len(_UID) if table.uids is None else list(table.uids.T)
            columns = [table.split_keys(), table.ordinals, *extents, *crc32, *uids]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=max(1, table.n))


def _schema(members: Sequence[str]) -> pa.Schema:
    """Return the schema: keys, ordinals, extents, and checksums, which are null if they were not computed."""
    extents = [(f"{member}{part}", pa.int64()) for member in members for part in (_OFFSET, "_size")]
    checksums = [(f"{member}{_CRC32}", pa.uint32()) for member in members]
    return pa.schema([("key", pa.binary()), ("ordinal", pa.int32()), *extents, *checksums])


class SampleLocation(NamedTuple):
    """The location of a shard's sample table."""

    part: Path
    group: int  # number of the row group in the file


class SampleParts:
    """The sample tables of several shards, stored at `places`; `members` are the members that all tables list."""

    def __init__(self, places: Sequence[SampleLocation], members: frozenset[str]) -> None:
        self.places, self.members = tuple(places), members

    @classmethod
    def open(cls, places: Sequence[SampleLocation], sizes: Sequence[int]) -> SampleParts:
        """Open tables, reading only file footers; raise UserError if a table is missing or has the wrong row count."""
        rows, members = dict[Path, list[int]](), list[set[str]]()
        for part in dict.fromkeys(place.part for place in places):
            with _opened(part) as file:
                rows[part] = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
                names = file.schema_arrow.names
                members.append({name.removesuffix(_OFFSET) for name in names if name.endswith(_OFFSET)})
        for shard, ((part, group), size) in enumerate(zip(places, sizes, strict=True)):
            if not 0 <= group < len(rows[part]) or rows[part][group] != size:
                raise UserError(
                    f"The table of shard {shard} in {part} does not fit the manifest; restore it or build it again."
                )
        return cls(places, frozenset(set.intersection(*members) if members else MEMBERS))

    @classmethod
    def join(cls, several: Sequence[SampleParts]) -> SampleParts:
        """Concatenate the tables of several manifests."""
        places = [place for parts in several for place in parts.places]
        return cls(places, frozenset.intersection(*(parts.members for parts in several)))

    def table(self, shard: int) -> SampleTable:
        """Read a shard's table; raise UserError if it is missing or damaged."""
        part, group = self.places[shard]
        with _opened(part) as file:
            return _table(file.read_row_group(group))

    def image_checksums(self) -> Iterator[NDArray[np.uint64]]:
        """Yield, file by file, a number for each image with a known CRC-32; identical images have equal numbers."""
        for crc32, sizes in self._columns(f"image{_CRC32}", "image_size"):
            yield ((sizes << np.uint64(32)) + crc32)[sizes > 0]

    def uids(self) -> Iterator[NDArray[np.uint64]]:
        """Yield, file by file, the uids that the samples' JSON contains, as (q, 2) arrays of 64-bit words."""
        for words in self._columns(*_UID):
            uids = np.stack(words, axis=1)
            yield uids[uids.any(axis=1)]

    def _columns(self, *names: str) -> Iterator[list[NDArray[np.uint64]]]:
        """Yield, file by file, the given columns as numbers; skip files in which a value is missing."""
        for part, places in groupby(sorted(self.places), key=attrgetter("part")):
            with _opened(part) as file:
                columns = file.read_row_groups([place.group for place in places], names).columns
            if not any(column.null_count for column in columns):
                yield [column.to_numpy().astype(np.uint64) for column in columns]

    def source(self, shard: int) -> tuple[object, ...]:
        """Return the identity of a shard's table: the file's path, size and modification time, and the row group."""
        part, group = self.places[shard]
        try:
            status = part.stat()
        except OSError as error:
            raise _unreadable(part, error) from error
        return str(part.absolute()), status.st_size, status.st_mtime_ns, group


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
    return UserError(f"The manifest's file {path} cannot be read ({reason}); restore it or build it again.")


def _table(rows: pa.Table) -> SampleTable:
    named = [name.removesuffix(_OFFSET) for name in rows.column_names if name.endswith(_OFFSET)]
    members = (*MEMBERS, *(name for name in named if name not in MEMBERS))
    schema = _schema(members)
    keys, ordinals, *columns = rows.select(schema.names).cast(schema).columns
    places, checksums = columns[: 2 * len(members)], columns[2 * len(members) :]
    extents = np.stack([column.to_numpy() for column in places], axis=1)
    if any(column.null_count for column in (keys, ordinals, *places)) or (extents < _NO_OFFSET).any():
        raise ValueError("it has rows without an offset")
    known = not any(column.null_count for column in checksums)
    crc32 = np.stack([column.to_numpy() for column in checksums], axis=1) if known else None
    extents = extents.reshape(len(rows), len(members), 2)
    return SampleTable(ordinals.to_numpy(), extents, b"\0".join(keys.to_pylist()), crc32, members)
