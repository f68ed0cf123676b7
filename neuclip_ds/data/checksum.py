"""Checksum of a file."""

import zlib
from pathlib import Path

_CHUNK_BYTES = 8 << 20


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a file; raise OSError if it cannot be read."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
