"""Select subsets of a pool by uid, using .npy files of sorted 128-bit uids, as published by DataComp and DFN.

A sample's JSON stores the uid as 32 hex digits. If the JSON has no uid, a hash of the sample's location in its shard is
used. The .npy files store each uid as a pair of 64-bit words (dtype `u8,u8`, high word first). A file of a billion uids
takes 16 GB, so files are memory-mapped, and each is searched for all uids of a shard at once.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from neuclip_ds.data.decoders import json_object
from neuclip_ds.errors import UserError, explained

UID = np.dtype([("high", "<u8"), ("low", "<u8")])
_HEX = re.compile("[0-9a-fA-F]{32}")
_CHUNK = 1 << 22  # number of uids checked at once
UidArray = NDArray[np.void]  # dtype UID


class UidFiles:
    """Sorted uids in memory-mapped files. Raises UserError if a file is unreadable or has the wrong dtype or shape."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._files = [_map(Path(path)) for path in paths]

    def check_order(self) -> None:
        """Read all files once; raise UserError if a file is not sorted."""
        for file in self._files:
            for start in range(0, len(file), _CHUNK):
                chunk = file[start : start + _CHUNK + 1]
                high = chunk["high"]
                low = chunk["low"]
                is_sorted = (high[:-1] < high[1:]) | ((high[:-1] == high[1:]) & (low[:-1] <= low[1:]))
                if not is_sorted.all():
                    name = getattr(file, "filename", "a uid file")
                    raise UserError(f"{name} is not sorted; sort it with numpy (np.sort) and save it again.")

    def count(self, uids: UidArray) -> NDArray[np.int64]:
        """Return how many times (q,) the files list each of the q uids."""
        counts = np.zeros(len(uids), dtype=np.int64)
        for listed in self._files:
            counts += np.searchsorted(listed, uids, side="right") - np.searchsorted(listed, uids, side="left")
        return counts


def parse_uid(text: object) -> tuple[int, int] | None:
    """Return the two 64-bit words of a uid that is written as 32 hex digits, or None for anything else."""
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        return None
    return int(text[:16], 16), int(text[16:], 16)


def parse_uids(texts: pa.Array) -> UidArray:
    """Return the uids in an array of strings, ignoring strings that are not 32 hex digits."""
    texts = pc.cast(texts, pa.string())
    valid = texts.filter(pc.fill_null(pc.match_substring_regex(texts, f"^{_HEX.pattern}$"), False))
    words = np.frombuffer(bytes.fromhex("".join(valid.to_pylist())), dtype=">u8").reshape(-1, 2)
    uids = np.empty(len(words), dtype=UID)
    uids["high"] = words[:, 0]
    uids["low"] = words[:, 1]
    return uids


def uid_of(data: bytes, key: str) -> tuple[int, int] | None:
    """Return the uid under `key` in a sample's JSON member, or None if there is no valid uid."""
    return parse_uid(json_object(data).get(key))


def uid_of_location(shard: str, extents: NDArray[np.int64]) -> tuple[int, int]:
    """Return a uid for a sample without one: a hash of its shard's file name and the (m, 2) extents of its members."""
    location = Path(shard).name.encode("utf-8", "surrogateescape") + extents.astype("<i8").tobytes()
    digest = hashlib.md5(location, usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def _map(path: Path) -> UidArray:
    with explained(f"The uid file {path} cannot be read", "pass a .npy file with an array of dtype u8,u8"):
        listed = np.lib.format.open_memmap(path, mode="r")
    words = [listed.dtype[name].str for name in listed.dtype.names or ()]
    if words != ["<u8", "<u8"] or listed.dtype.itemsize != UID.itemsize or listed.ndim != 1:
        raise UserError(
            f"The uid file {path} contains an array of dtype {listed.dtype} and shape {listed.shape}; save a "
            'one-dimensional array of dtype np.dtype("u8,u8"), with the first 16 hex digits of each uid in the first '
            "field and the last 16 in the second."
        )
    return listed.view(UID)
