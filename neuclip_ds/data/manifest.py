"""The manifest of a data set: its shards, and the global index at which each one starts.

A sample's index is its shard's start plus its row among the shard's samples, incomplete ones included, so it never
changes. Manifests only grow: new shards get indices after the last one, and a removed shard leaves its indices unused
(`removed`). On disk a manifest is a folder with

    shards.parquet                      one row per shard; version and totals in the file's metadata
    samples/part-FIRST-LAST.parquet     optional: offsets and keys of the samples (neuclip_ds/data/sample_table.py)

A manifest with sample tables may list only some samples of each shard (a subset of a larger pool, indexed separately).
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.sample_table import SampleParts
from neuclip_ds.data.shards import is_local, refuse_commands
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

_VERSION = 2
_TABLE = "shards.parquet"
SAMPLES = "samples"
_SCHEMA = pa.schema(
    [("path", pa.string())]
    + [(name, pa.int64()) for name in ("start", "n", "bytes", "n_bad", "crc32", "selection")]
    + [("removed", pa.bool_()), ("layout", pa.int64())]
)
_OPTIONAL = ("crc32", "selection", "layout")
MIN_SAMPLE_BYTES = 512  # the header of one member
_MAX_SHARD_BYTES = 1 << 40


class Shard(NamedTuple):
    """One tar of `n` samples, with indices start ... start + n - 1."""

    path: str
    start: int
    n: int
    bytes: int
    n_bad: int = 0  # samples known to have no image or caption
    crc32: int | None = None  # checksum of the file, where one was computed
    selection: int | None = None  # checksum of the listed samples' ordinals, where not all are listed
    removed: bool = False
    layout: int | None = None  # checksum of all samples' names, offsets and sizes; None in older manifests


class Manifest:
    """The shards of a data set in the order of their indices.

    Attributes:
        n: number of indices, those of removed shards included: the size of per-sample tables.
        samples: sample tables, where the manifest has them.
    """

    def __init__(self, shards: Sequence[Shard], samples: SampleParts | None = None) -> None:
        self.shards = tuple(shards)
        self.samples = samples
        self.n_shards = len(self.shards)
        self._starts = [shard.start for shard in self.shards]
        self.n = sum(shard.n for shard in self.shards)
        self.n_bad = sum(shard.n_bad for shard in self.shards if not shard.removed)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Index of each shard's first sample, (n_shards,)."""
        return np.array(self._starts, dtype=np.int64)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of samples in use in each shard, (n_shards,): 0 for removed shards."""
        return self.sizes_without(self.removed)

    @cached_property
    def removed(self) -> tuple[int, ...]:
        """Numbers of the shards that are not in use."""
        return tuple(number for number, shard in enumerate(self.shards) if shard.removed)

    def sizes_without(self, removed: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of samples in each shard, (n_shards,), 0 for those removed."""
        sizes = np.array([shard.n for shard in self.shards], dtype=np.int64)
        sizes[list(removed)] = 0
        return sizes

    @property
    def n_used(self) -> int:
        """Number of samples in use."""
        return int(self.sizes.sum())

    @property
    def has_checksums(self) -> bool:
        """Whether every read is compared with a checksum."""
        checked = self.samples is not None and self.samples.has_checksums
        return checked and all(shard.crc32 is not None for shard in self.shards if not shard.removed)

    @cached_property
    def content_hash(self) -> str:
        """Identity of the data set: `hash_of_first(n_shards)`."""
        return self.hash_of_first(self.n_shards)

    def use_hash_of(self, count: int, removed: Sequence[int]) -> str:
        """Return a hash (16 hex digits) of which of the first shards are in use, as earlier checkpoints have it."""
        return hashlib.sha256(self.sizes_without(removed)[:count].tobytes()).hexdigest()[:16]

    def hash_of_first(self, count: int) -> str:
        """Return a hash (32 hex digits) of the file names, counts and sizes of the first shards.

        Folders do not count (data may move), nor do removals. A manifest that has grown still gives its old hash for
        its old number of shards.
        """
        digest = hashlib.sha256()
        for shard in self.shards[:count]:
            line = f"{Path(shard.path).name}\0{shard.n}\0{shard.bytes}\0{shard.selection}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (shard number, row within it) of a global index; raise IndexError beyond 0 ... n - 1."""
        if not 0 <= index < self.n:
            raise IndexError(f"sample index {index} is out of range for a data set of {self.n} samples")
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def used(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at (q,) positions 0 ... n_used - 1 among the samples in use."""
        return indices_at(self.starts, self.sizes, positions)


def indices_at(starts: NDArray[np.int64], sizes: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the (q,) indices at positions in the concatenation of (s,) shards."""
    ends = np.cumsum(sizes)
    shards = np.searchsorted(ends, positions, side="right")
    return starts[shards] + positions - (ends - sizes)[shards]


def extend(manifest: Manifest | None, found: Sequence[Shard]) -> Manifest:
    """Return `manifest` with shards appended, whose indices follow the last one."""
    shards = [] if manifest is None else list(manifest.shards)
    start = sum(shard.n for shard in shards)
    for shard in found:
        shards.append(shard._replace(start=start))
        start += shard.n
    return Manifest(shards)


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a manifest folder."""
    return (Path(path) / _TABLE).is_file()


def write_shards(manifest: Manifest, folder: Path) -> None:
    """Write or replace the manifest's shard table atomically; the sample tables must already be there.

    Only its owner can read a table whose URLs hold secrets.
    """
    columns = zip(*manifest.shards, strict=True) if manifest.shards else [[]] * len(_SCHEMA)
    meta = {"version": _VERSION, "n": manifest.n, "content_hash": manifest.content_hash}
    schema = _SCHEMA.with_metadata({f"neuclip_ds.{key}": str(value) for key, value in meta.items()})
    with atomic_write(folder / _TABLE) as temporary:
        table = pa.table([list(column) for column in columns], schema=schema)
        pq.write_table(table, temporary, write_page_checksum=True)
        if any(redact(shard.path) != shard.path for shard in manifest.shards):
            temporary.chmod(0o600)  # the secrets of its URLs are needed to fetch them


def load_manifest(
    folder: str | os.PathLike[str], *, check_shards: bool = True, allow_commands: bool = False
) -> Manifest:
    """Read a manifest folder.

    Args:
        check_shards: whether to compare the first and the largest shard with the description.
        allow_commands: whether shards may be `pipe:` commands, which readers run.

    Raises:
        UserError: it is none, is damaged or impossible, has commands that nobody has allowed, or its first or largest
            shard is not what it describes.
    """
    folder = Path(folder)
    if not is_manifest(folder):
        raise UserError(f"{folder} is not a manifest folder (it has no {_TABLE}); run neuclip-ds build-manifest first.")
    meta = _read_meta(folder)
    if meta.get("version") != str(_VERSION):
        raise UserError(f"The manifest in {folder} has version {meta.get('version')}, not {_VERSION}; build it again.")
    try:
        rows = pq.read_table(folder / _TABLE, schema=_SCHEMA, page_checksum_verification=True)
    except (ValueError, KeyError, OSError, pa.ArrowException) as error:
        raise _unreadable(folder, error) from error
    if any(rows.column(name).null_count for name in _SCHEMA.names if name not in _OPTIONAL):
        raise _unreadable(folder, "values are missing")
    samples = SampleParts(folder / SAMPLES) if (folder / SAMPLES).is_dir() else None
    shards = [Shard(*row) for row in zip(*rows.to_pydict().values(), strict=True)]
    manifest = Manifest(shards, samples)
    _check_possible(folder, manifest)
    if meta.get("content_hash") != manifest.content_hash:
        raise UserError(f"The manifest in {folder} does not match its own hash; remove it and build it again.")
    if samples is not None:
        samples.check([shard.n for shard in shards])
    used = [shard for shard in shards if not shard.removed]
    if not allow_commands:
        refuse_commands([shard.path for shard in used], f"the manifest in {folder}", "--data.allow_commands=true")
    if check_shards and used:
        _check_present(folder, used[0])
        _check_present(folder, max(used, key=lambda shard: shard.n))
    return manifest


def _check_possible(folder: Path, manifest: Manifest) -> None:
    """Raise UserError for numbers that no shards have: tables as large as they say are allocated."""
    start = 0
    for shard in manifest.shards:
        least = 0 if shard.selection is not None else shard.n * MIN_SAMPLE_BYTES  # a selection may repeat samples
        if shard.start != start or shard.n < 0 or not least <= shard.bytes <= _MAX_SHARD_BYTES:
            raise UserError(
                f"The manifest in {folder} says that {shard.path} has {shard.n} samples from index {shard.start} in "
                f"{shard.bytes} bytes, which cannot be; build it again."
            )
        start += shard.n


def _check_present(folder: Path, shard: Shard) -> None:
    """Raise UserError unless a local shard exists and has its size."""
    if not is_local(shard.path):
        return
    try:
        found = Path(shard.path).stat().st_size
    except (OSError, ValueError) as error:
        raise UserError(
            f"Shard {shard.path} of the manifest in {folder} does not exist; "
            "restore the shards or build the manifest where they are now."
        ) from error
    check_size(shard, found)


def check_size(shard: Shard, found: int) -> None:
    """Raise UserError unless the shard's file has the size of the manifest."""
    if found != shard.bytes:
        raise UserError(
            f"Shard {shard.path} has {found} bytes where the manifest has {shard.bytes}: "
            "it has changed; rebuild or update the manifest."
        )


def _read_meta(folder: Path) -> dict[str, str]:
    try:
        pairs = pq.read_schema(folder / _TABLE).metadata or {}
        return {key.decode().removeprefix("neuclip_ds."): value.decode() for key, value in pairs.items()}
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception | str) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"The manifest in {folder} cannot be read ({reason}); remove it and build it again.")
