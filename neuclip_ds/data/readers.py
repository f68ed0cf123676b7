"""Reads the bytes of a sample by its global index: with our tar reader, or through the webdataset library.

Readers live in loader workers. They open shards when first asked for a sample of one and keep the recent ones; remote
shards are read through the node's cache.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import webdataset

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.sample_table import IMAGE_EXTENSIONS, MEMBERS, SampleTable, tabulate
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.tar import read_index, read_members
from neuclip_ds.errors import UserError

Value = TypeVar("Value")

_OPEN_SHARDS = 256  # file descriptors a worker keeps
_INDEXED_SAMPLES = 16_000_000  # 56 bytes and its key each
_WEBDATASET_BYTES = 1 << 30  # webdataset knows no seeking: whole shards are held


class RawSample(NamedTuple):
    """A sample as stored: its image, None where it has none, and the members that captions are taken from."""

    image: bytes | None
    texts: Mapping[str, bytes]


class Reader(Protocol):
    """Random access to the samples of a manifest."""

    def read(self, index: int, with_image: bool = True) -> RawSample:
        """Bytes of one sample. OSError when reading fails, UserError when the shard is not the manifest's."""
        ...

    def key(self, index: int) -> str:
        """The sample's key: the folder and stem of its members."""
        ...


class RecentlyUsed(Generic[Value]):
    """Loads a value per shard on demand and keeps the most recent ones up to a total weight, at least one."""

    def __init__(
        self,
        load: Callable[[int], Value],
        capacity: int,
        weigh: Callable[[Value], int] | None = None,
        release: Callable[[Value], None] | None = None,
    ) -> None:
        self._load, self._capacity, self._weigh, self._release = load, capacity, weigh, release
        self._values: OrderedDict[int, Value] = OrderedDict()
        self._weight = 0

    def get(self, shard: int) -> Value:
        if shard not in self._values:
            self._values[shard] = self._load(shard)
            self._weight += self._weight_of(self._values[shard])
            while self._weight > self._capacity and len(self._values) > 1:
                self.drop(next(iter(self._values)))
        self._values.move_to_end(shard)
        return self._values[shard]

    def drop(self, shard: int) -> None:
        """Forget a shard's value, if it is there."""
        if shard in self._values:
            value = self._values.pop(shard)
            self._weight -= self._weight_of(value)
            if self._release is not None:
                self._release(value)

    def _weight_of(self, value: Value) -> int:
        return 1 if self._weigh is None else self._weigh(value)


class TarReader:
    """Reads members by offset; where the manifest does not have the offsets, a shard's headers are walked once."""

    def __init__(self, manifest: Manifest, texts: Sequence[str] = ("txt",), cache: ShardCache | None = None) -> None:
        """
        Args:
            manifest: whose samples are read.
            texts: members that captions are taken from, of `sample_table.MEMBERS`.
            cache: of remote shards; needed where there are any.
        """
        self._manifest, self._texts, self._cache = manifest, tuple(texts), cache
        self._members = [MEMBERS.index(name) for name in ("image", *texts)]
        self._tables = RecentlyUsed(self._load_table, _INDEXED_SAMPLES, weigh=_n_of)
        # a shard that is evicted from the cache occupies the disk until it is closed, so one is held at a time
        capacity = _OPEN_SHARDS if cache is None else 1
        self._files = RecentlyUsed(self._open, capacity, release=os.close)

    def read(self, index: int, with_image: bool = True) -> RawSample:
        shard, row = self._manifest.locate(index)
        extents = self._tables.get(shard).extents[row].tolist()
        wanted = [extents[member] for member in (self._members if with_image else self._members[1:])]
        try:
            found = read_members(self._files.get(shard), wanted)
        except OSError:
            self._files.drop(shard)  # a stale handle must not spoil the next attempt
            raise
        image = found.pop(0) if with_image else None
        return RawSample(image, {name: text for name, text in zip(self._texts, found, strict=True) if text is not None})

    def key(self, index: int) -> str:
        shard, row = self._manifest.locate(index)
        return self._tables.get(shard).key(row)

    def _open(self, shard: int) -> int:
        path, expected = self._manifest.shards[shard].path, self._manifest.shards[shard].bytes
        if not is_local(path):
            return _cache_for(path, self._cache).open(path, expected)
        fd = os.open(path, os.O_RDONLY)
        found = os.fstat(fd).st_size
        if found != expected:
            os.close(fd)
            raise UserError(
                f"Shard {path} has {found} bytes where the manifest has {expected}: "
                "it has changed; build the manifest again, or update it."
            )
        return fd

    def _load_table(self, shard: int) -> SampleTable:
        if self._manifest.samples is not None:
            return self._manifest.samples.table(shard)
        table = tabulate(read_index(self._files.get(shard)).samples)
        _check_count(self._manifest.shards[shard], table.n, "it has changed; build the manifest again")
        return table


class WebdatasetReader:
    """Reads each shard from end to end with webdataset and holds it in memory; for comparison."""

    def __init__(self, manifest: Manifest, texts: Sequence[str] = ("txt",), cache: ShardCache | None = None) -> None:
        """As `TarReader`."""
        self._manifest, self._texts, self._cache = manifest, texts, cache
        self._shards = RecentlyUsed(self._load, _WEBDATASET_BYTES, weigh=_bytes_of)

    def read(self, index: int, with_image: bool = True) -> RawSample:
        shard, row = self._manifest.locate(index)
        sample = self._shards.get(shard)[row][1]
        return sample if with_image else sample._replace(image=None)

    def key(self, index: int) -> str:
        shard, row = self._manifest.locate(index)
        return self._shards.get(shard)[row][0]

    def _load(self, number: int) -> list[tuple[str, RawSample]]:
        shard = self._manifest.shards[number]
        # The pipeline's inner part: WebDataset itself would split shards over the workers and ranks that it finds.
        path = shard.path
        if not is_local(path):
            path = str(_cache_for(path, self._cache).path(path, shard.bytes))
        source = [{"url": path}]
        found = webdataset.tariterators.tarfile_samples(source)
        samples = [(sample["__key__"], self._raw_sample(sample)) for sample in found]
        if shard.selection is not None and self._manifest.samples is not None:
            rows = self._manifest.samples.table(number).ordinals.tolist()
            samples = [samples[row] for row in rows if row < len(samples)]
        _check_count(shard, len(samples), "webdataset loses what lies behind damage; use reader=tar")
        return samples

    def _raw_sample(self, sample: dict[str, bytes]) -> RawSample:
        image = next((sample[extension] for extension in IMAGE_EXTENSIONS if extension in sample), None)
        return RawSample(image, {name: sample[name] for name in self._texts if name in sample})


def _cache_for(path: str, cache: ShardCache | None) -> ShardCache:
    if cache is None:
        raise UserError(f"Shard {path} is remote and there is no cache for it; set data.cache_dir.")
    return cache


def _n_of(table: SampleTable) -> int:
    return table.n


def _bytes_of(samples: list[tuple[str, RawSample]]) -> int:
    return sum(len(sample.image or b"") + sum(map(len, sample.texts.values())) for _, sample in samples)


def _check_count(shard: Shard, found: int, mend: str) -> None:
    if found != shard.n:
        raise UserError(f"Shard {shard.path} yields {found} samples where the manifest has {shard.n}: {mend}.")


def open_reader(
    name: Literal["tar", "webdataset"], manifest: Manifest, texts: Sequence[str], cache: ShardCache | None
) -> Reader:
    """The reader of that name (`data.reader`)."""
    reader = TarReader if name == "tar" else WebdatasetReader
    return reader(manifest, texts, cache)
