"""Read the bytes of a sample by its global index, with our tar reader or with the webdataset library.

Readers run in loader workers. They open a shard on its first sample and keep the recently used ones open; remote shards
are read from the node's cache. What the manifest has checksums of is compared with them at every read. Offsets are
shared by the node's processes (neuclip_ds/data/node_tables.py).
"""

import logging
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import webdataset

from neuclip_ds.data.cache import ShardCache, private_folder
from neuclip_ds.data.failures import FailureKind
from neuclip_ds.data.fetch import FetchError
from neuclip_ds.data.manifest import Manifest, Shard, check_size
from neuclip_ds.data.node_tables import NodeTables
from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS, MEMBERS, SampleTable, tabulate
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.tar import read_index, read_members
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

Value = TypeVar("Value")

OPEN_SHARDS = 256  # open file descriptors of a worker
_TABLE_BYTES = 1 << 30  # private memory of a worker's tables
_MAPPING_BYTES = 1 << 16  # that a mapped table counts for: 16,384 mappings of the 65,530 that Linux allows a process
_SAMPLE_BYTES = 80  # of a table that is not mapped
_CHANGED = "it has changed; rebuild the manifest"
_CHANGED_OR_MISCOUNTED = (
    "it has changed, or img2dataset's side file has a wrong count; omit it from the sources and run "
    "build-manifest --update"
)
_WEBDATASET_BYTES = 1 << 30  # webdataset cannot seek, so whole shards are kept


class RawSample(NamedTuple):
    """The stored bytes of a sample: its image, if it has one, and its members with captions."""

    image: bytes | None
    texts: Mapping[str, bytes]


class ChecksumError(OSError):
    """Raised for bytes that are not those the manifest was built from."""


class RecentlyUsed(Generic[Value]):
    """A cache of one value per shard: keeps the most recently used ones up to a total weight, at least one."""

    def __init__(
        self,
        load: Callable[[int], Value],
        capacity: int,
        weigh: Callable[[Value], int] = lambda value: 1,
        release: Callable[[Value], None] = lambda value: None,
    ) -> None:
        self._load, self._capacity, self._weigh, self._release = load, capacity, weigh, release
        self._values: OrderedDict[int, Value] = OrderedDict()
        self._weight = 0

    def get(self, shard: int) -> Value:
        """Return a shard's value, loading it if needed."""
        if shard not in self._values:
            self._values[shard] = self._load(shard)
            self._weight += self._weigh(self._values[shard])
            while self._weight > self._capacity and len(self._values) > 1:
                self.drop(next(iter(self._values)))
        self._values.move_to_end(shard)
        return self._values[shard]

    def drop(self, shard: int) -> None:
        """Remove a shard's value, if it is cached."""
        if shard in self._values:
            value = self._values.pop(shard)
            self._weight -= self._weigh(value)
            self._release(value)


class TarReader:
    """Read members by offset; if the manifest has no offsets, a shard's headers are walked once on each node.

    Args:
        manifest: manifest of the samples.
        texts: members with captions.
        cache: cache of the shards that it serves; required if any is remote.
    """

    def __init__(self, manifest: Manifest, texts: Sequence[str] = ("txt",), cache: ShardCache | None = None) -> None:
        self._manifest, self._texts, self._cache = manifest, tuple(texts), cache
        self._node_tables = _node_tables(cache)
        self._tables = RecentlyUsed(self._load_table, _TABLE_BYTES, weigh=_weight)
        # a shard evicted from the cache occupies the disk until it is closed, so only one is open at a time
        capacity = OPEN_SHARDS if cache is None else 1
        self._files = RecentlyUsed(self._open, capacity, release=os.close)

    def read(self, index: int, with_image: bool = True) -> RawSample:
        """Return the bytes of a sample.

        Raises:
            ChecksumError: the bytes are damaged.
            OSError: reading fails.
            UserError: the shard is another one than that of the manifest.
        """
        shard, row = self._manifest.locate(index)
        table = self._tables.get(shard)
        extents = table.extents[row].tolist()
        members = self._places(table)[0 if with_image else 1 :]
        try:
            found = read_members(self._files.get(shard), [extents[member] for member in members])
            if table.crc32 is not None:
                self._verify(shard, zip(members, found, table.crc32[row, members].tolist(), strict=True))
        except OSError:
            self._files.drop(shard)  # the next attempt must not use a stale file descriptor
            raise
        image = found.pop(0) if with_image else None
        return RawSample(image, {name: text for name, text in zip(self._texts, found, strict=True) if text is not None})

    def announce(self, indices: Iterable[int]) -> None:
        """Let the disk begin to read samples of shards that are read in place, all at once.

        One after the other, each read would wait for the disk: cold reads were 2 to 4 times slower so.
        """
        for index in indices:
            shard, row = self._manifest.locate(index)
            if _cache_for(self._manifest.shards[shard].path, self._cache) is not None:
                continue
            with suppress(OSError, UserError):  # `read` will tell
                table = self._tables.get(shard)
                for offset, size in table.extents[row, self._places(table)].tolist():
                    if size > 0:
                        os.posix_fadvise(self._files.get(shard), offset, size, os.POSIX_FADV_WILLNEED)

    def key(self, index: int) -> str:
        """Return the sample's key: the folder and stem of its members."""
        shard, row = self._manifest.locate(index)
        return self._tables.get(shard).key(row)

    def keys(self, shard: int, rows: slice) -> list[str]:
        """Return the keys of neighbouring samples of a shard; raise as `read` does."""
        found = self._tables.get(shard).split_keys()[rows]
        return [key.decode("utf-8", "replace") for key in found]

    def _open(self, shard: int) -> int:
        path, expected, crc32 = attrgetter("path", "bytes", "crc32")(self._manifest.shards[shard])
        if (cache := _cache_for(path, self._cache)) is not None:
            try:
                return cache.open(path, expected, crc32)
            except FetchError as error:
                if error.kind is FailureKind.DAMAGED and self._manifest.shards[shard].layout is None:
                    raise UserError(f"{error} It has changed; run build-manifest --update.") from error
                raise
        fd = os.open(path, os.O_RDONLY)
        try:
            check_size(self._manifest.shards[shard], os.fstat(fd).st_size)
        except UserError:
            os.close(fd)
            raise
        return fd

    def _load_table(self, shard: int) -> SampleTable:
        path, samples = self._manifest.shards[shard].path, self._manifest.samples
        if samples is not None:
            return self._shared(path, samples.source(shard), partial(samples.table, shard))
        status = os.fstat(self._files.get(shard))
        others = [name for name in self._texts if name not in MEMBERS]
        source: tuple[object, ...] = (status.st_size, status.st_ino, *others)
        # a copy's times are those of its uses, and its tables are discarded when it is fetched
        if _cache_for(path, self._cache) is None:
            source += (status.st_mtime_ns, status.st_ctime_ns)
        table = self._shared(path, source, partial(self._walk, shard))
        self._check_layout(shard, table)
        described = self._manifest.shards[shard]
        _check_count(described, table.n, _CHANGED if described.layout is not None else _CHANGED_OR_MISCOUNTED)
        return table

    def _shared(self, path: str, source: tuple[object, ...], make: Callable[[], SampleTable]) -> SampleTable:
        return make() if self._node_tables is None else self._node_tables.get(path, source, make)

    def _walk(self, shard: int) -> SampleTable:
        return tabulate(read_index(self._files.get(shard)).samples, self._texts)

    def _places(self, table: SampleTable) -> list[int]:
        """Return where a table has the image and the texts."""
        return [table.members.index(name) for name in ("image", *self._texts)]

    def _check_layout(self, shard: int, table: SampleTable) -> None:
        """Raise UserError if these samples, all of a shard, are as many as in the manifest but not the same."""
        described = self._manifest.shards[shard]
        if described.layout not in (None, table.layout) and table.n == described.n:
            raise UserError(
                f"Shard {described.path} has other samples than the manifest, in as many bytes: it was replaced or "
                "damaged; restore it, or rebuild or update the manifest."
            )

    def _verify(self, shard: int, members: Iterable[tuple[int, bytes | None, int]]) -> None:
        for member, data, expected in members:
            if data is not None and zlib.crc32(data) != expected:
                self._check_layout(shard, self._walk(shard))  # a replaced shard is a mistake to fix, not a bad sample
                name = self._tables.get(shard).members[member]
                raise ChecksumError(f"{name} is not what the manifest was built from")


class WebdatasetReader:
    """Read whole shards with webdataset and keep them in memory, as `TarReader`; for comparison."""

    def __init__(self, manifest: Manifest, texts: Sequence[str] = ("txt",), cache: ShardCache | None = None) -> None:
        self._manifest, self._texts, self._cache = manifest, texts, cache
        self._shards = RecentlyUsed(self._load, _WEBDATASET_BYTES, weigh=_bytes_of)

    def read(self, index: int, with_image: bool = True) -> RawSample:
        shard, row = self._manifest.locate(index)
        sample = self._shards.get(shard)[row][1]
        return sample if with_image else sample._replace(image=None)

    def announce(self, indices: Iterable[int]) -> None:
        """Do nothing: shards are read whole."""

    def key(self, index: int) -> str:
        shard, row = self._manifest.locate(index)
        return self._shards.get(shard)[row][0]

    def _load(self, number: int) -> list[tuple[str, RawSample]]:
        shard = self._manifest.shards[number]
        # Only the inner part of the pipeline: WebDataset would split the shards over workers and ranks.
        path = shard.path
        if (cache := _cache_for(path, self._cache)) is not None:
            path = str(cache.path(path, shard.bytes, shard.crc32))
        found = webdataset.tariterators.tarfile_samples([{"url": path}])
        samples = [(sample["__key__"], self._raw_sample(sample)) for sample in found]
        if shard.selection is not None and self._manifest.samples is not None:
            rows = self._manifest.samples.table(number).ordinals.tolist()
            samples = [samples[row] for row in rows if row < len(samples)]
        _check_count(shard, len(samples), "webdataset drops the samples after a damaged header; set data.reader=tar")
        return samples

    def _raw_sample(self, sample: dict[str, bytes]) -> RawSample:
        image = next((sample[extension] for extension in IMAGE_EXTENSIONS if extension in sample), None)
        return RawSample(image, {name: sample[name] for name in self._texts if name in sample})


def _node_tables(cache: ShardCache | None) -> NodeTables | None:
    """Return the node's tables, next to its cache or in this user's folder, or None if that is unsafe."""
    if cache is not None:
        return cache.tables
    try:
        return NodeTables(private_folder() / "tables")
    except UserError as error:
        log.warning("sample tables are not shared between processes, which takes more memory: %s", error)
        return None


def _weight(table: SampleTable) -> int:
    is_mapped = isinstance(table.keys, memoryview)
    return _MAPPING_BYTES if is_mapped else _SAMPLE_BYTES * table.n


def _cache_for(path: str, cache: ShardCache | None) -> ShardCache | None:
    """Return the cache that a shard is read from, None for a shard that is read in place."""
    if cache is None and not is_local(path):
        raise UserError(f"Shard {path} is remote, which needs a cache; set data.cache_dir.")
    return cache if cache is not None and cache.serves(path) else None


def _bytes_of(samples: list[tuple[str, RawSample]]) -> int:
    return sum(len(sample.image or b"") + sum(map(len, sample.texts.values())) for _, sample in samples)


def _check_count(shard: Shard, found: int, hint: str) -> None:
    if found != shard.n:
        raise UserError(f"Shard {shard.path} yields {found} samples where the manifest has {shard.n}: {hint}.")


READERS: dict[str, type[TarReader | WebdatasetReader]] = {"tar": TarReader, "webdataset": WebdatasetReader}
