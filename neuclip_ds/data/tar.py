"""Index tar shards by walking their headers, without losing the samples after a damaged header.

For well-formed shards, the samples are the same as in webdataset 1.0.2, with three exceptions: a hard link is read as
the member of the same tar that it names, because GNU tar stores files with equal inodes as hard links; sparse members
are skipped; and the files that macOS adds (`._NAME`, `__MACOSX/`) are ignored.

After a damaged header, Python's `tarfile`, and thus webdataset, silently drops the rest of the shard. This module
continues at the next valid header and records the gap. It reads POSIX.1-1988 ustar, POSIX.1-2001 pax and GNU tars (long
names, base-256 numbers).

A name ends at its first NUL and is never used as a path. The running time is linear in the size of the tar.
"""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_BLOCK = 512
_SCAN_CHUNK = 1 << 20
_MAX_EXTENSION = 2 << 20  # maximum bytes of a long name or of pax records
_REGULAR = b"0\x007"  # type flags of regular files: "0", NUL (before POSIX) and "7" (contiguous)
_HARD_LINK = b"1"
_SYMBOLIC_LINK = b"2"
_WITHOUT_DATA = b"123456"  # links, devices, folders, pipes: tarfile ignores their sizes, because they have no data
_GNU_NAME = b"L"
_GNU_LINK = b"K"
_GNU_SPARSE = b"S"
# offsets of the byte that says whether a block with the rest of a sparse file's map follows
_IS_EXTENDED = 482  # in the header
_IS_EXTENDED_AGAIN = 504  # in such a block
_PAX_LOCAL = b"xX"
_PAX_GLOBAL = b"g"
_EXTENSIONS = _GNU_NAME + _GNU_LINK + _PAX_LOCAL + _PAX_GLOBAL  # headers that describe the next header

_PAX_RECORD = re.compile(rb"([0-9]{1,18}) ([^=]*)=")  # followed by a value and by the newline that ends the record
_SPARSE = "GNU.sparse"
_META_MEMBER = re.compile(r"__[^/]*__($|/)")


class Extent(NamedTuple):
    """A range of bytes in a shard."""

    offset: int
    size: int


class SampleEntry(NamedTuple):
    """One sample: its key and the extents of its members, keyed by lowercase extension without the leading dot."""

    key: str
    members: dict[str, Extent]


class ShardIndex(NamedTuple):
    """The samples of a shard in order, including incomplete samples, and the problems of the shard."""

    samples: list[SampleEntry]
    gaps: list[Extent]  # damaged regions
    split: int = 0  # samples with the key of an earlier sample, for example because a sample's members are not adjacent
    repeated: int = 0  # members that are ignored, because an earlier member of the sample has their extension
    unreadable: int = 0  # ignored members: sparse files, symbolic links, and hard links that name no earlier member


class _Blocks:
    """A reader of header blocks; it reads 4096 bytes at a time, because headers of small members are close together."""

    READ = 4096

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = 0  # offset of the bytes that were read last
        self._data = b""

    def at(self, offset: int) -> bytes:
        """Return the 512 bytes at an offset, or fewer at the end of the file."""
        within = offset - self._start
        if not 0 <= within <= len(self._data) - _BLOCK:
            self._start = offset
            self._data = os.pread(self._fd, self.READ, offset)
            within = 0
        return self._data[within : within + _BLOCK]


class _BadHeader(Exception):
    """Raised for an invalid tar header; `_member` sets `resume`, the offset at which to look for the next header."""

    resume = 0


class _Header(NamedTuple):
    name: str
    size: int
    kind: bytes
    target: str = ""  # name of the member that a hard link refers to


class _Member(NamedTuple):
    """A member of a tar; `extent` is None for links and sparse files; `target` is the member that a hard link names."""

    name: str
    extent: Extent | None
    target: str = ""


def read_index(fd: int) -> ShardIndex:
    """Index a tar, given its file descriptor; raise OSError if the tar cannot be read.

    A member with a damaged header or truncated data is omitted from its sample, and its bytes are recorded in `gaps`.
    """
    gaps: list[Extent] = []
    index = _group_members(_walk(fd, os.fstat(fd).st_size, gaps))
    return index._replace(gaps=gaps)


def is_blank(fd: int, extent: Extent) -> bool:
    """Return whether a region contains only zeros, like the end-of-archive blocks between concatenated tars."""
    end = extent.offset + extent.size
    for offset in range(extent.offset, end, _SCAN_CHUNK):
        if os.pread(fd, min(_SCAN_CHUNK, end - offset), offset).strip(b"\0"):
            return False
    return True


def _group_members(members: Iterator[_Member]) -> ShardIndex:
    """Group consecutive members with the same key into samples, keeping only the first member per extension."""
    samples: list[SampleEntry] = []
    first_of_key: dict[str, SampleEntry] = {}
    split = 0
    repeated = 0
    unreadable = 0
    for name, extent, target in members:
        key, extension = _split(name)
        # webdataset's metadata: a top-level file named `__*__`, or any file in a top-level folder named `__*__`
        if not key or _META_MEMBER.match(name) or ("/" not in name and name[:2] == "__" == name[-2:]):
            continue
        if _is_from_mac(name):
            continue
        if extent is None:
            target_key, target_extension = _split(target)
            entry = first_of_key.get(target_key)
            extent = entry.members.get(target_extension.lower()) if entry is not None else None
            if extent is None:
                unreadable += 1
                continue
        if not samples or samples[-1].key != key:
            sample = SampleEntry(key, {})
            samples.append(sample)
            split += first_of_key.setdefault(key, sample) is not sample
        if samples[-1].members.setdefault(extension.lower(), extent) is not extent:
            repeated += 1
    return ShardIndex(samples, [], split, repeated, unreadable)


def _is_from_mac(name: str) -> bool:
    """Return whether a member holds metadata that macOS adds to archives."""
    return name.rpartition("/")[2].startswith("._") or "/__MACOSX/" in f"/{name}"


def _split(name: str) -> tuple[str, str]:
    """Return the key and the extension of a member's name, both empty if the name does not belong to a sample.

    Webdataset's `((?:.*/|)[^.]+)[.]([^/]*)` gives the same result, but in time quadratic in the number of folders.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or (not stem and (not slash or "." in folder.rpartition("/")[2])):
        return "", ""
    return f"{folder}{slash}{stem}", extension


def _walk(fd: int, end: int, gaps: list[Extent]) -> Iterator[_Member]:
    """Yield each regular, linked or sparse member in order; append damaged regions to `gaps`."""
    shared: dict[str, str] = {}  # pax records for all following members
    blocks = _Blocks(fd)
    offset = 0
    while offset < end:
        try:
            header, data_offset, pax_records = _member(blocks, fd, offset, end, shared)
        except _BadHeader as bad:
            next_header = _next_header(fd, bad.resume, end)
            # an archive ends with zeros (two blocks, or the rest of the file), with no header after them
            if next_header < end or os.pread(fd, 2 * _BLOCK, offset).strip(b"\0"):
                _add_gap(gaps, offset, next_header)
            offset = next_header
            continue
        if header.kind in _REGULAR and _SPARSE not in pax_records:
            yield _Member(header.name, Extent(data_offset, header.size))
        elif header.kind == _HARD_LINK:
            yield _Member(header.name, None, header.target)
        elif header.kind in _REGULAR or header.kind in (_GNU_SPARSE, _SYMBOLIC_LINK):
            yield _Member(header.name, None)
        offset = data_offset
        if header.kind not in _WITHOUT_DATA:
            offset += _padded(header.size)


def _add_gap(gaps: list[Extent], start: int, end: int) -> None:
    """Append a damaged region, or extend the last one if it ends at `start`."""
    if gaps and gaps[-1].offset + gaps[-1].size == start:
        start = gaps.pop().offset
    gaps.append(Extent(start, end - start))


def _member(
    blocks: _Blocks, fd: int, offset: int, end: int, shared: dict[str, str]
) -> tuple[_Header, int, dict[str, str]]:
    """Return the header of the member at `offset`, the offset of its data, and the pax records that apply to it.

    Extension headers (long names, pax) precede a member's header; if two contain a name, the first wins, as in tarfile.
    """
    long_name: str | None = None
    long_target = ""
    local: dict[str, str] = {}  # pax records of this member
    resume = offset + _BLOCK
    try:
        while (header := _parse(blocks.at(offset))).kind in _EXTENSIONS:
            if not 0 <= header.size <= min(_MAX_EXTENSION, end - offset - _BLOCK):
                raise _BadHeader
            payload = os.pread(fd, header.size, offset + _BLOCK)
            offset = resume = offset + _BLOCK + _padded(header.size)  # so that nothing is read twice
            if header.kind == _GNU_NAME:
                long_name = long_name or local.get("path") or _text(payload)
            elif header.kind == _GNU_LINK:
                long_target = long_target or _text(payload)
            elif header.kind == _PAX_GLOBAL:
                shared.update(_pax_records(payload))
            elif header.kind in _PAX_LOCAL:
                local = {**_pax_records(payload), **local}
        data_offset = offset + _BLOCK
        if header.kind == _GNU_SPARSE:  # blocks with the rest of the file's map may follow its header
            is_extended = blocks.at(offset)[_IS_EXTENDED]
            while is_extended and data_offset < end:
                is_extended = blocks.at(data_offset).ljust(_BLOCK, b"\0")[_IS_EXTENDED_AGAIN]
                data_offset += _BLOCK
        records = {**shared, **local}
        if records or long_name is not None:
            name = header.name
            if "path" in records:
                name = records["path"].rstrip("/")
            size = _size(records["size"]) if "size" in records else header.size
            header = _Header(long_name or name, size, header.kind, records.get("linkpath", header.target))
        if long_target:
            header = header._replace(target=long_target)
        if header.size < 0 or (header.kind not in _WITHOUT_DATA and data_offset + header.size > end):
            raise _BadHeader
    except _BadHeader as bad:
        bad.resume = resume
        raise
    return header, data_offset, records


def _parse(block: bytes) -> _Header:
    """Parse a 512-byte header after verifying its checksum."""
    if len(block) != _BLOCK:
        raise _BadHeader
    _verify_checksum(block)
    name = _text(block[:100])
    prefix = _text(block[345:500])
    kind = block[156:157]
    if prefix and kind not in (_GNU_NAME, _GNU_LINK, _GNU_SPARSE):
        name = f"{prefix}/{name}"
    if kind == b"\0" and name.endswith("/"):  # pre-POSIX tars mark folders this way
        kind = b"5"
    target = _text(block[157:257]) if kind == _HARD_LINK else ""
    return _Header(name, _number(block[124:136]), kind, target)


def _verify_checksum(block: bytes) -> None:
    """Verify a header's checksum: the sum of its bytes (signed in some old tars), with the checksum field blank."""
    field = block[148:156]
    expected = _number(field)
    excess = sum(field) - 8 * ord(" ")  # the sum over the block minus the sum with a blank field
    # the low half of Adler-32 is 1 + the sum of the bytes, modulo 65521, and takes a tenth of the time of sum()
    if (zlib.adler32(block) & 0xFFFF) == (expected + excess + 1) % 65521:
        return
    unsigned_sum = sum(block) - excess
    signed_sum = unsigned_sum - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
    if expected != signed_sum:
        raise _BadHeader


def _number(field: bytes) -> int:
    """Parse an octal number, or a GNU base-256 number if the first byte is 0x80."""
    if field[0] == 0o200:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError as error:
        raise _BadHeader from error


def _size(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise _BadHeader from error


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax_records(payload: bytes) -> dict[str, str]:
    """Parse `LENGTH KEYWORD=VALUE\\n` records (LENGTH covers the whole record); keep the keywords of this module."""
    records: dict[str, str] = {}
    start = 0
    end = len(payload.rstrip(b"\0"))
    while start < end:
        match = _PAX_RECORD.match(payload, start)
        stop = start + int(match[1]) if match else 0
        if match is None or not match.end() < stop <= end or payload[stop - 1 : stop] != b"\n":
            raise _BadHeader
        keyword = match[2].decode("utf-8", "replace")
        if keyword in ("path", "size", "linkpath"):
            records[keyword] = _text(payload[match.end() : stop - 1])
        elif keyword.startswith(f"{_SPARSE}."):
            records[_SPARSE] = ""
        start = stop
    return records


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _next_header(fd: int, offset: int, end: int) -> int:
    """Search for a valid header in steps of 512 bytes from `offset`; return its offset, or `end` if there is none."""
    size = _Blocks.READ  # small at first: if every block looks like a header, each search ends immediately
    while offset < end:
        chunk = os.pread(fd, size, offset)
        if chunk.strip(b"\0"):
            for start in range(0, len(chunk), _BLOCK):
                with suppress(_BadHeader):
                    _parse(chunk[start : start + _BLOCK])
                    return offset + start
        offset += size
        size = min(2 * size, _SCAN_CHUNK)
    return end
