"""Sample tables as flat bytes, which a process can use where they are, such as in a file that it maps into memory.

A header of 32 bytes (magic, CRC-32 of all that follows, flags, n, bytes of the keys), and the arrays of `SampleTable`:
extents, ordinals, checksums or none, keys, and at the end the names of the members that are not in `MEMBERS`. Of the
flags, the lowest bit tells whether there are checksums, and the others are the number of those members.
"""

import struct
import zlib

import numpy as np

from neuclip_ds.data.sample_table import MEMBERS, SampleTable

_MAGIC = b"NDStable"
_HEADER = struct.Struct("<8sIIqq")
_SIGNED = 12  # bytes before those that the CRC-32 covers


def dump_table(table: SampleTable) -> bytes:
    """Return the bytes of a table."""
    crc32 = b"" if table.crc32 is None else table.crc32.tobytes()
    others = table.members[len(MEMBERS) :]
    header = _HEADER.pack(_MAGIC, 0, (table.crc32 is not None) + 2 * len(others), table.n, len(table.keys))
    arrays = [table.extents.tobytes(), table.ordinals.tobytes(), crc32, table.keys]
    data = b"".join([header[_SIGNED:], *arrays, "".join(f"\0{name}" for name in others).encode()])
    return _MAGIC + struct.pack("<I", zlib.crc32(data)) + data


def view_table(buffer: bytes | memoryview) -> SampleTable:
    """Return the table whose bytes are in `buffer`, without copying them; raise ValueError if they are damaged."""
    view = memoryview(buffer)
    if len(view) < _HEADER.size:
        raise ValueError(f"a table of {len(view)} bytes is truncated")
    magic, crc32, flags, n, key_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or zlib.crc32(view[_SIGNED:]) != crc32:
        raise ValueError("a table differs from its checksum")
    has_checksums, count = flags & 1, len(MEMBERS) + (flags >> 1)
    extents = np.frombuffer(view, np.int64, n * count * 2, _HEADER.size)
    end = _HEADER.size + extents.nbytes
    ordinals = np.frombuffer(view, np.int32, n, end)
    end += ordinals.nbytes
    checksums = np.frombuffer(view, np.uint32, n * count * has_checksums, end).reshape(-1, count)
    end += checksums.nbytes
    keys, others = view[end : end + key_bytes], bytes(view[end + key_bytes :]).decode().split("\0")[1:]
    assert len(keys) == key_bytes
    members = (*MEMBERS, *others)
    return SampleTable(ordinals, extents.reshape(n, count, 2), keys, checksums if has_checksums else None, members)
