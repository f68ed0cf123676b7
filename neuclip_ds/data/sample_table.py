"""Sample tables: offsets and keys of a shard's samples, on disk as parquet with one row group per shard.

A manifest may hold these tables (`samples/part-FIRST-LAST.parquet`, named by shard numbers). Then a shard's headers are
not walked when it is first opened, and the manifest may list only some of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from neuclip_ds.data.tar import Extent, SampleEntry

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")  # a sample's image is the first of these that it has
MEMBERS = ("image", "txt", "json")  # members with stored extents
_NO_OFFSET = -1

_SCHEMA = pa.schema(
    [("key", pa.binary()), ("ordinal", pa.int32())]
    + [(f"{member}_{part}", pa.int64()) for member in MEMBERS for part in ("offset", "size")]
)


class SampleTable(NamedTuple):
    """The n samples of a shard as arrays: 56 bytes and the key per sample, instead of 600 as objects."""

    ordinals: NDArray[np.int32]  # (n,) position among all samples of the tar
    extents: NDArray[np.int64]  # (n, 3, 2): offset and size of image, txt, json; offset -1 if absent
    keys: str  # joined by NUL, which no name contains

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.ordinals)

    def extent(self, row: int, member: str) -> Extent | None:
        """Return the extent of a sample's member, or None if it has none."""
        offset, size = self.extents[row, MEMBERS.index(member)].tolist()
        return None if offset == _NO_OFFSET else Extent(offset, size)

    def has(self, member: str) -> NDArray[np.bool_]:
        """Return which samples have a member, (n,)."""
        return self.extents[:, MEMBERS.index(member), 0] != _NO_OFFSET

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        return self.keys.split("\0")[row]

    def take(self, rows: NDArray[np.int64]) -> SampleTable:
        """Return the table of some of the samples."""
        keys = self.keys.split("\0")
        return SampleTable(self.ordinals[rows], self.extents[rows], "\0".join(keys[row] for row in rows.tolist()))


def tabulate(samples: Sequence[SampleEntry]) -> SampleTable:
    """Return the table of all samples of a shard."""
    extents = [[_image(entry), *(entry.members.get(member, _NONE) for member in MEMBERS[1:])] for entry in samples]
    return SampleTable(
        np.arange(len(samples), dtype=np.int32),
        np.array(extents, dtype=np.int64).reshape(len(samples), len(MEMBERS), 2),
        "\0".join(entry.key for entry in samples),
    )


_NONE = Extent(_NO_OFFSET, 0)


def _image(entry: SampleEntry) -> Extent:
    return next((entry.members[extension] for extension in IMAGE_EXTENSIONS if extension in entry.members), _NONE)


def part_name(first: int, last: int) -> str:
    """Return the file name of the tables of shards first ... last."""
    return f"part-{first:08d}-{last:08d}.parquet"


def write_part(path: Path, tables: Sequence[SampleTable]) -> None:
    """Write sample tables to a file, one row group each."""
    delta = {name: "DELTA_BINARY_PACKED" for name in _SCHEMA.names if name != "key"}
    with pq.ParquetWriter(
        path, _SCHEMA, compression="zstd", use_dictionary=False, column_encoding={**delta, "key": "DELTA_BYTE_ARRAY"}
    ) as writer:
        for table in tables:
            keys = table.keys.encode("utf-8", "surrogateescape").split(b"\0") if table.n else []
            columns = [keys, table.ordinals, *table.extents.reshape(table.n, len(_SCHEMA.names) - 2).T]
            writer.write_table(pa.table(columns, schema=_SCHEMA), row_group_size=max(1, table.n))


class SampleParts:
    """The sample tables in a folder of part files."""

    def __init__(self, folder: Path) -> None:
        self._parts = list_parts(folder)

    def table(self, shard: int) -> SampleTable:
        """Read a shard's table; raise KeyError if no part has it."""
        for first, last, path in self._parts:
            if first <= shard <= last:
                return self._read(path, shard - first)
        raise KeyError(shard)

    def _read(self, path: Path, group: int) -> SampleTable:
        with pq.ParquetFile(path) as file:
            rows = file.read_row_group(group)
        keys = rows.column("key").to_pylist()
        extents = np.stack([rows.column(name).to_numpy() for name in _SCHEMA.names[2:]], axis=1)
        return SampleTable(
            rows.column("ordinal").to_numpy(),
            extents.reshape(len(keys), len(MEMBERS), 2),
            b"\0".join(keys).decode("utf-8", "surrogateescape"),
        )


def list_parts(folder: Path) -> list[tuple[int, int, Path]]:
    """Return first shard, last shard and path of each part file in a folder."""
    return sorted((*_shards_of(path), path) for path in folder.glob("part-*.parquet"))


def _shards_of(path: Path) -> tuple[int, int]:
    first, last = path.stem.split("-")[1:]
    return int(first), int(last)
