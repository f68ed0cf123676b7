"""The manifest of a dataset: its shards, and the global index at which each shard starts.

A sample's index is its shard's first index plus its position among the samples that the manifest lists for the shard.
These are all samples of the shard, including incomplete ones, unless the manifest was built with `--uids`. It then
describes a subset of a larger pool in its sample tables (neuclip_ds/data/sample_table.py), and only the samples of the
subset have indices; a sample that is listed several times has several indices.
"""

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.data.sample_table import SampleTables, TableLocation
from neuclip_ds.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A tar with `n` samples, whose indices are start ... start + n - 1."""

    path: str
    start: int
    n: int
    bytes: int
    n_bad: int = 0  # number of samples known to lack an image or a caption
    crc32: int | None = None  # checksum of the file; None if it was not computed
    selection: int | None = None  # checksum of the listed samples' positions in the tar; None without --uids
    layout: int | None = None  # checksum of all samples' keys, offsets and sizes; None if they were not read


SHARD_FIELDS = tuple(field.name for field in fields(Shard))


def shards_to_columns(shards: Sequence[Shard]) -> dict[str, list[Any]]:
    """Return the shards as columns: a list of values for each field name."""
    return {name: [getattr(shard, name) for shard in shards] for name in SHARD_FIELDS}


def shards_from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Shard]:
    """Rebuild the shards from columns like those of `shards_to_columns`, ignoring other columns."""
    rows = zip(*(columns[name] for name in SHARD_FIELDS), strict=True)
    return [Shard(**dict(zip(SHARD_FIELDS, row, strict=True))) for row in rows]


class Manifest:
    """The shards of a dataset in index order and, optionally, the sample tables of these shards.

    Attributes:
        held_out: the number of samples at the end of each shard that are held out for `validation`, by shard number.
        n: the number of indices, and thus the number of rows of per-sample state.
        n_bad: the number of samples known to lack an image or a caption.
        starts: (n_shards,) the index of the first sample that is used from each shard.
        sizes: (n_shards,) the number of samples that are used from each shard.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        samples: SampleTables | None = None,
        held_out: Mapping[int, int] | None = None,
        *,
        starts: NDArray[np.int64] | None = None,
        sizes: NDArray[np.int64] | None = None,
    ) -> None:
        """Without `starts` and `sizes`, all samples that are not held out are used."""
        self.shards = tuple(shards)
        self.samples = samples
        self.held_out = dict(held_out or {})
        self.n_shards = len(self.shards)
        self.n = sum(shard.n for shard in self.shards)
        self.n_bad = sum(shard.n_bad for shard in self.shards)
        self._shard_starts = [shard.start for shard in self.shards]
        if starts is None:
            starts = np.array(self._shard_starts, dtype=np.int64)
        if sizes is None:
            counts = [shard.n for shard in self.shards]
            sizes = np.array(counts, dtype=np.int64) - self._held_out_sizes()
        self.starts = starts
        self.sizes = sizes

    def validation(self) -> "Manifest":
        """Return a manifest of the held-out samples, which keep their indices."""
        return Manifest(self.shards, self.samples, starts=self.starts + self.sizes, sizes=self._held_out_sizes())

    def _held_out_sizes(self) -> NDArray[np.int64]:
        """Return the number of samples that are held out from each shard, (n_shards,)."""
        sizes = np.zeros(self.n_shards, dtype=np.int64)
        for number, count in self.held_out.items():
            sizes[number] = count
        return sizes

    @property
    def n_used(self) -> int:
        """The number of samples in use, that is, not held out."""
        return int(self.sizes.sum())

    @property
    def has_checksums(self) -> bool:
        """Whether every read is verified against a checksum."""
        return self.samples is not None and all(shard.crc32 is not None for shard in self.shards)

    @cached_property
    def content_hash(self) -> str:
        """A hash that identifies the dataset: `hash_of_first(n_shards)`."""
        return self.hash_of_first(self.n_shards)

    def hash_of_first(self, count: int) -> str:
        """Return the `hash_of_shards` of the first `count` shards."""
        return hash_of_shards(self.shards[:count])

    def layout_of_first(self, count: int) -> str | None:
        """Return the `layout_of_shards` of the first `count` shards."""
        return layout_of_shards(self.shards[:count])

    def to_json(self) -> dict[str, Any]:
        """Return the input for `from_json` on other ranks, which must have the same sample tables at the same paths.

        The counts in `held_out` are not included.
        """
        content: dict[str, Any] = {"shards": shards_to_columns(self.shards)}
        if self.samples is not None:  # so that other ranks need not open the tables' files
            content["tables"] = [[str(location.file), location.row_group] for location in self.samples.locations]
            content["members"] = sorted(self.samples.members)
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Manifest":
        """Rebuild a manifest from the result of `to_json`."""
        samples = None
        if "tables" in content:
            locations = [TableLocation(Path(file), row_group) for file, row_group in content["tables"]]
            samples = SampleTables(locations, frozenset(content["members"]))
        return cls(shards_from_columns(content["shards"]), samples)

    def locate(self, index: int) -> tuple[int, int]:
        """Convert a global index to (shard number, row in the shard); raise IndexError if it is outside 0 ... n - 1."""
        if not 0 <= index < self.n:
            raise IndexError(f"sample index {index} is out of range for a dataset of {self.n} samples")
        shard = bisect_right(self._shard_starts, index) - 1
        return shard, index - self._shard_starts[shard]


def hash_of_shards(shards: Sequence[Shard]) -> str:
    """Return a hash (32 hex digits) of the shards' file names, sample counts, sizes and selections.

    The folders of the shards do not affect the hash, so the data may be moved.
    """
    digest = hashlib.sha256()
    for shard in shards:
        line = f"{Path(shard.path).name}\0{shard.n}\0{shard.bytes}\0{shard.selection}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def layout_of_shards(shards: Sequence[Shard]) -> str | None:
    """Return a hash (32 hex digits) of the shards' layouts, or None if the layout of any shard is not known.

    A shard's layout is a checksum of its samples' keys, offsets and sizes. This hash can therefore differ between data
    with the same `hash_of_shards`, whose shards have the same names, sizes and numbers of samples. `hash_of_shards`
    omits the layouts, because a manifest from side files does not contain them.
    """
    layouts = [shard.layout for shard in shards]
    if None in layouts:
        return None
    return hashlib.sha256(repr(layouts).encode()).hexdigest()[:32]


def has_same_layout(stored: str | None, current: str | None) -> bool:
    """Return whether two results of `layout_of_shards` are equal; true if either is None, that is, not known."""
    return None in (stored, current) or stored == current


def indices_at(starts: NDArray[np.int64], sizes: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the global indices (q,) of the samples at `positions` (q,) in the concatenation of the shards."""
    ends = np.cumsum(sizes)
    shards = np.searchsorted(ends, positions, side="right")
    return starts[shards] + positions - (ends - sizes)[shards]


def from_shards(shards: Sequence[Shard]) -> Manifest:
    """Return a manifest of the given shards, numbering their samples in list order."""
    starts = itertools.accumulate((shard.n for shard in shards), initial=0)
    return Manifest([replace(shard, start=start) for shard, start in zip(shards, starts, strict=False)])


def join(manifests: Sequence[Manifest]) -> Manifest:
    """Join manifests, numbering their samples consecutively.

    The result has sample tables if all manifests have them. Raises UserError if one manifest selects samples by uid
    and another one has no sample tables.
    """
    shards: list[Shard] = []
    for manifest in manifests:
        start = shards[-1].start + shards[-1].n if shards else 0
        shards += [replace(shard, start=start + shard.start) for shard in manifest.shards]
    tables = [manifest.samples for manifest in manifests if manifest.samples is not None]
    if len(tables) == len(manifests):
        return Manifest(shards, SampleTables.join(tables))
    if any(shard.selection is not None for shard in shards):
        lacking = next(manifest for manifest in manifests if manifest.samples is None)
        raise UserError(
            "A manifest that was built with --uids can be combined only with manifests that contain sample tables, but "
            f"that of {lacking.shards[0].path} contains none: build a manifest of each source, without --no-checksum "
            "and without --from-side-files."
        )
    return Manifest(shards)


def check_size(shard: Shard, file_bytes: int) -> None:
    """Raise UserError unless the size of a shard's file matches the manifest."""
    if file_bytes != shard.bytes:
        raise UserError(
            f"Shard {shard.path} is {file_bytes} bytes long, but the manifest lists {shard.bytes} bytes; build the "
            "manifest again or, if you passed the shards instead of a manifest, repeat the command."
        )
