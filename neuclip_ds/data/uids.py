"""Subsets of a pool by uid, as DataComp and DFN publish them: .npy files of sorted 128-bit numbers.

A uid stands in the sample's JSON as 32 hex digits; in the files it is a pair of 64-bit words (dtype `u8,u8`), high word
first. A file of a billion uids takes 16 GB: it is mapped, never loaded, and searched for a shard's uids at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.errors import UserError

UID = np.dtype([("high", "<u8"), ("low", "<u8")])
_CHECKED_AT_ONCE = 1 << 22
UidArray = NDArray[np.void]  # dtype UID


class UidFiles:
    """The uids of some files.

    Raises:
        UserError: a file is absent, of another dtype, or not sorted.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._files = [_map(Path(path)) for path in paths]

    def check_order(self) -> None:
        """Reads all files once; UserError where one is not sorted."""
        for path_words in self._files:
            for start in range(0, len(path_words), _CHECKED_AT_ONCE):
                words = path_words[start : start + _CHECKED_AT_ONCE + 1]
                if not _less_or_equal(words[:-1], words[1:]).all():
                    name = getattr(path_words, "filename", "a uid file")
                    raise UserError(f"{name} is not sorted; sort it with numpy (np.sort) and save it again.")

    def count(self, uids: UidArray) -> NDArray[np.int64]:
        """How often each of (q,) uids is listed."""
        found = np.zeros(len(uids), dtype=np.int64)
        for words in self._files:
            found += _bound(words, uids, above=True) - _bound(words, uids, above=False)
        return found


def parse_uid(text: object) -> tuple[int, int] | None:
    """The two words of 32 hex digits, None for anything else."""
    if not isinstance(text, str) or len(text) != 32:
        return None
    try:
        return int(text[:16], 16), int(text[16:], 16)
    except ValueError:
        return None


def uid_of(data: bytes, key: str) -> tuple[int, int] | None:
    """The uid in a sample's JSON member, None where it has none."""
    try:
        tree = json.loads(data)
    except ValueError:
        return None
    return parse_uid(tree.get(key)) if isinstance(tree, dict) else None


def _map(path: Path) -> UidArray:
    try:
        words = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"The uid file {path} cannot be read ({error}); it is to be a .npy of dtype u8,u8.") from error
    if words.dtype.names is None or len(words.dtype) != 2 or words.dtype.itemsize != 16 or words.ndim != 1:
        raise UserError(f"The uid file {path} has dtype {words.dtype}, not u8,u8; save pairs of 64-bit words.")
    return words.view(UID)


def _less_or_equal(left: UidArray, right: UidArray) -> NDArray[np.bool_]:
    same = left["high"] == right["high"]
    return (left["high"] < right["high"]) | (same & (left["low"] <= right["low"]))


def _bound(words: UidArray, uids: UidArray, *, above: bool) -> NDArray[np.int64]:
    """First positions whose word is >= (or, `above`, >) each uid: bisection of all of them at once."""
    low = np.zeros(len(uids), dtype=np.int64)
    high = np.full(len(uids), len(words), dtype=np.int64)
    for _ in range(len(words).bit_length()):
        middle = (low + high) // 2
        probe = words[np.minimum(middle, len(words) - 1)]
        goes_right = _less_or_equal(probe, uids) if above else ~_less_or_equal(uids, probe)
        goes_right &= low < high
        low, high = np.where(goes_right, middle + 1, low), np.where(goes_right, high, middle)
    return low
