"""Reads the bytes of a sample by its global index: with our tar reader, or through the webdataset library.

Readers live in loader workers. They open shards when first asked for a sample of one and keep the recent ones.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import webdataset
from numpy.typing import NDArray

from neuclip_ds.data.manifest import CAPTION_EXTENSION, IMAGE_EXTENSIONS, Manifest
from neuclip_ds.data.tar import Extent, SampleEntry, read_index, read_member
from neuclip_ds.errors import UserError

Value = TypeVar("Value")

_OPEN_SHARDS = 256  # file descriptors a worker keeps
_INDEXED_SAMPLES = 16_000_000  # about 40 bytes each
_WEBDATASET_BYTES = 1 << 30  # webdataset knows no seeking: whole shards are held


class RawPair(NamedTuple):
    """A sample as stored; None where it has no such member."""

    image: bytes | None
    caption: bytes | None


class Reader(Protocol):
    """Random access to the samples of a manifest."""

    def read(self, index: int, with_image: bool = True) -> RawPair:
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
        weigh: Callable[[Value], int] = lambda value: 1,
        release: Callable[[Value], None] = lambda value: None,
    ) -> None:
        self._load, self._capacity, self._weigh, self._release = load, capacity, weigh, release
        self._values: OrderedDict[int, Value] = OrderedDict()
        self._weight = 0

    def get(self, shard: int) -> Value:
        if shard not in self._values:
            self._values[shard] = self._load(shard)
            self._weight += self._weigh(self._values[shard])
            while self._weight > self._capacity and len(self._values) > 1:
                self.drop(next(iter(self._values)))
        self._values.move_to_end(shard)
        return self._values[shard]

    def drop(self, shard: int) -> None:
        """Forget a shard's value, if it is there."""
        if shard in self._values:
            value = self._values.pop(shard)
            self._weight -= self._weigh(value)
            self._release(value)


class _ShardTable(NamedTuple):
    """The index of a shard, compact: its objects would take some 600 bytes a sample."""

    extents: NDArray[np.int64]  # (n, 4): offset and size of the image, of the caption; -1 where there is none
    keys: str  # joined by NUL, which no name can hold


class TarReader:
    """Reads members by offset; a shard's headers are walked once, when its first sample is asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tables = RecentlyUsed(self._index, _INDEXED_SAMPLES, weigh=lambda table: len(table.extents))
        self._files = RecentlyUsed(self._open, _OPEN_SHARDS, release=os.close)

    def read(self, index: int, with_image: bool = True) -> RawPair:
        shard, ordinal = self._manifest.locate(index)
        image, caption = self._tables.get(shard).extents[ordinal].reshape(2, 2).tolist()
        try:
            return RawPair(self._member(shard, *image) if with_image else None, self._member(shard, *caption))
        except OSError:
            self._files.drop(shard)  # a stale handle must not spoil the next attempt
            raise

    def key(self, index: int) -> str:
        shard, ordinal = self._manifest.locate(index)
        return self._tables.get(shard).keys.split("\0")[ordinal]

    def _member(self, shard: int, offset: int, size: int) -> bytes | None:
        return None if offset < 0 else read_member(self._files.get(shard), Extent(offset, size))

    def _open(self, shard: int) -> int:
        return os.open(self._manifest.shards[shard].path, os.O_RDONLY)

    def _index(self, shard: int) -> _ShardTable:
        samples = read_index(self._manifest.shards[shard].path).samples
        _check_count(self._manifest, shard, len(samples), "it has changed; build the manifest again")
        rows = [[*_image_extent(entry), *_extent(entry, CAPTION_EXTENSION)] for entry in samples]
        return _ShardTable(
            np.array(rows, dtype=np.int64).reshape(len(rows), 4), "\0".join(entry.key for entry in samples)
        )


def _image_extent(entry: SampleEntry) -> tuple[int, int]:
    present = (extension for extension in IMAGE_EXTENSIONS if extension in entry.members)
    return _extent(entry, next(present, ""))


def _extent(entry: SampleEntry, extension: str) -> tuple[int, int]:
    return entry.members.get(extension, (-1, 0))


class WebdatasetReader:
    """Reads each shard from end to end with webdataset and holds it in memory; for comparison."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._shards = RecentlyUsed(self._load, _WEBDATASET_BYTES, weigh=_bytes_of)

    def read(self, index: int, with_image: bool = True) -> RawPair:
        shard, ordinal = self._manifest.locate(index)
        pair = self._shards.get(shard)[ordinal][1]
        return pair if with_image else pair._replace(image=None)

    def key(self, index: int) -> str:
        shard, ordinal = self._manifest.locate(index)
        return self._shards.get(shard)[ordinal][0]

    def _load(self, shard: int) -> list[tuple[str, RawPair]]:
        # The pipeline's inner part: WebDataset itself would split shards over the workers and ranks that it finds.
        source = [{"url": self._manifest.shards[shard].path}]
        samples = [(sample["__key__"], _raw_pair(sample)) for sample in webdataset.tariterators.tarfile_samples(source)]
        _check_count(self._manifest, shard, len(samples), "webdataset loses what lies behind damage; use reader=tar")
        return samples


def _raw_pair(sample: dict[str, bytes]) -> RawPair:
    image = next((sample[extension] for extension in IMAGE_EXTENSIONS if extension in sample), None)
    return RawPair(image, sample.get(CAPTION_EXTENSION))


def _bytes_of(samples: list[tuple[str, RawPair]]) -> int:
    return sum(len(pair.image or b"") + len(pair.caption or b"") for _, pair in samples)


def _check_count(manifest: Manifest, shard: int, found: int, mend: str) -> None:
    path, expected = manifest.shards[shard].path, manifest.shards[shard].n
    if found != expected:
        raise UserError(f"Shard {path} yields {found} samples where the manifest has {expected}: {mend}.")


def open_reader(name: Literal["tar", "webdataset"], manifest: Manifest) -> Reader:
    """The reader of that name (`data.reader`)."""
    return TarReader(manifest) if name == "tar" else WebdatasetReader(manifest)
