"""Journal of a build: each process appends what it finds of a shard, so that an interruption loses no shard.

    scans-PROCESS.jsonl     a line for each shard: its scan, and offset and size of its sample table
    tables-PROCESS.bin      the tables, compressed

Entries are found by the shard's path, whatever else is built. A line that a killed process has left unfinished is
ignored.
"""

import functools
import json
import os
import uuid
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.flat_table import dump_table, view_table
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.sample_table import SampleTable
from neuclip_ds.data.scan import BadRow, Scan
from neuclip_ds.errors import UserError

RESUME = "run the same command again, which resumes"


class TablePlace(NamedTuple):
    """Where a sample table is."""

    file: Path
    offset: int
    size: int

    def read(self) -> SampleTable:
        """Read the table; raise UserError if it is damaged."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                return view_table(zlib.decompress(file.read(self.size)))
        except (OSError, ValueError, TypeError, zlib.error) as error:
            raise _damaged(self.file) from error


class Entry(NamedTuple):
    """What was found of a shard."""

    scan: Scan
    table: TablePlace | None


def append(folder: Path, found: Iterable[tuple[Scan, SampleTable | None]]) -> None:
    """Append scans of shards, with their tables or without; raise UserError if the disk is full."""
    scans, tables = (folder / name.format(_process(os.getpid())) for name in ("scans-{}.jsonl", "tables-{}.bin"))
    lines = []
    for scan, table in found:
        place = None if table is None else _append(tables, zlib.compress(dump_table(table), 1))
        lines.append(f"{json.dumps([scan, place])}\n")
    _append(scans, "".join(lines).encode())


def read_journal(folder: Path) -> dict[str, Entry]:
    """Return the entries of all processes by the shard's path; raise UserError if a file is damaged."""
    entries = {}
    for path in folder.glob("scans-*.jsonl"):
        tables = path.with_name(path.name.replace("scans-", "tables-").replace(".jsonl", ".bin"))
        *lines, _ = path.read_bytes().split(b"\n")
        for line in lines:
            try:
                entry = _parse(line, tables)
            except (ValueError, TypeError, RecursionError) as error:
                raise _damaged(path) from error
            entries[entry.scan.shard.path] = entry
    return entries


@functools.cache
def _process(pid: int) -> str:
    """Return a name for this process that no other one has, on any node and at any time."""
    return f"{pid}-{uuid.uuid4().hex[:12]}"


def _append(path: Path, data: bytes) -> tuple[int, int]:
    """Append all the bytes or none; return their offset and size."""
    with explain_disk(path.parent, RESUME), path.open("ab", buffering=0) as file:
        offset = file.tell()
        try:
            written = file.write(data)
            if written != len(data):
                file.write(data[written:])  # raises what stopped the first one
        except OSError:
            file.truncate(offset)
            raise
    return offset, len(data)


def _parse(line: bytes, tables: Path) -> Entry:
    (shard, images, captions, extensions, lost, bad), place = json.loads(line)
    rows = tuple(BadRow(*row) for row in bad)
    scan = Scan(Shard(*shard), images, captions, tuple(extensions), lost, rows)
    if not isinstance(scan.shard.path, str):
        raise TypeError("a path is text")
    return Entry(scan, None if place is None else TablePlace(tables, *place))


def _damaged(path: Path) -> UserError:
    return UserError(f"{path}, a result of an interrupted build, is damaged; remove it and run the command again.")
