"""Sample tables as flat bytes, which a process can use where they are, such as in a file that it maps into memory.

A header of 32 bytes (magic, CRC-32 of all that follows, 1 if there are checksums, n, bytes of the keys), and the arrays
of `SampleTable`: extents, ordinals, checksums or none, keys.
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
    header = _HEADER.pack(_MAGIC, 0, table.crc32 is not None, table.n, len(table.keys))
    data = b"".join([header[_SIGNED:], table.extents.tobytes(), table.ordinals.tobytes(), crc32, table.keys])
    return _MAGIC + struct.pack("<I", zlib.crc32(data)) + data


def view_table(buffer: bytes | memoryview) -> SampleTable:
    """Return the table whose bytes are in `buffer`, without copying them; raise ValueError if they are damaged."""
    view = memoryview(buffer)
    if len(view) < _HEADER.size:
        raise ValueError(f"a table of {len(view)} bytes is truncated")
    magic, crc32, has_checksums, n, key_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or zlib.crc32(view[_SIGNED:]) != crc32:
        raise ValueError("a table differs from its checksum")
    extents = np.frombuffer(view, np.int64, n * len(MEMBERS) * 2, _HEADER.size)
    end = _HEADER.size + extents.nbytes
    ordinals = np.frombuffer(view, np.int32, n, end)
    end += ordinals.nbytes
    checksums = np.frombuffer(view, np.uint32, n * len(MEMBERS) * has_checksums, end).reshape(-1, len(MEMBERS))
    keys = view[end + checksums.nbytes :]
    assert len(keys) == key_bytes
    return SampleTable(ordinals, extents.reshape(n, len(MEMBERS), 2), keys, checksums if has_checksums else None)
