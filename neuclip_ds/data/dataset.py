"""From (epoch, index) pairs to a batch of tensors. A sample that cannot be used keeps its row, with valid = False."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.captions import Captions
from neuclip_ds.data.decoders import DecodeError
from neuclip_ds.data.hashing import hash64
from neuclip_ds.data.manifest import Manifest, indices_at
from neuclip_ds.data.readers import RawSample, TarReader, open_reader
from neuclip_ds.data.transforms import ImageTransform

log = logging.getLogger(__name__)

Tokenize = Callable[[list[str]], Tensor]  # b captions to int64 (b, T); picklable
PADDING = -1  # the index of a row that stands for no sample
_SHARDS_FOR_CAPTIONS = 100
_WHICH_CAPTION = 1  # keeps the draw among a sample's captions apart from its augmentation


class BadSample(NamedTuple):
    """A sample that could not be used, and why."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody misses here
    shard: str
    key: str
    reason: str  # CAUSE, or CAUSE: DETAILS

    @property
    def cause(self) -> str:
        """The kind of fault, by which bad samples are counted."""
        return self.reason.partition(":")[0]


class Batch(NamedTuple):
    """b rows. Rows with valid = False have a zero image and an empty caption; index -1 among them is padding."""

    image: Tensor  # uint8 (b, 3, H, W)
    tokens: Tensor  # int64 (b, T)
    index: Tensor  # type: ignore[assignment]  # int64 (b,), global indices
    valid: Tensor  # bool (b,)
    bad: tuple[BadSample, ...] = ()


class _Unusable(Exception):
    """The sample is bad; the message is the reason."""


class PairDataset(Dataset[Batch]):
    """Map-style: `dataset.__getitems__([(epoch, index), ...])` is a Batch, a function of its arguments alone."""

    def __init__(
        self,
        manifest: Manifest,
        transform: ImageTransform,
        tokenize: Tokenize,
        *,
        seed: int = 0,
        captions: Sequence[str] = ("txt",),
        reader: Literal["tar", "webdataset"] = "tar",
        cache: ShardCache | None = None,
    ) -> None:
        """
        Args:
            seed: of augmentation, and of the draw where a sample has several captions.
            captions: where they are, as `data.captions`.
            cache: of remote shards.
        """
        self._manifest, self._transform, self._tokenize, self._seed = manifest, transform, tokenize, seed
        self._captions = Captions(captions)
        self._reader = open_reader(reader, manifest, self._captions.extensions, cache)

    @property
    def folder(self) -> Path:
        """Where the first shard is, for messages."""
        return Path(self._manifest.shards[0].path).parent

    def __len__(self) -> int:
        return self._manifest.n

    def __getitem__(self, item: tuple[int, int]) -> Batch:
        return self.__getitems__([item])

    def __getitems__(self, items: Sequence[tuple[int, int]]) -> Batch:
        """
        Args:
            items: (epoch, index) of each row; index -1 gives an empty row.

        Raises:
            UserError: a shard is not the one that the manifest describes.
        """
        side = self._transform.image_size
        images = torch.zeros(len(items), 3, side, side, dtype=torch.uint8)
        captions, valid, bad = [""] * len(items), torch.zeros(len(items), dtype=torch.bool), []
        epochs, indices = np.array(items, dtype=np.int64).reshape(-1, 2).T
        known = np.maximum(indices, 0)
        randomness = hash64(self._seed, epochs, known).tolist()
        which = hash64(self._seed, epochs, known, _WHICH_CAPTION).tolist()
        for row, index in enumerate(indices.tolist()):
            if index == PADDING:
                continue
            try:
                images[row], captions[row] = self._pair(index, randomness[row], which[row])
                valid[row] = True
            except _Unusable as error:
                bad.append(self._describe(index, str(error)))
        return Batch(images, self._tokenize(captions), torch.from_numpy(indices.copy()), valid, tuple(bad))

    def _pair(self, index: int, randomness: int, which: int) -> tuple[Tensor, str]:
        raw = self._read(index)
        if raw.image is None:
            raise _Unusable("no image")
        if not raw.texts:
            raise _Unusable("no caption")
        captions = self._captions.of(raw.texts)
        if not captions:
            raise _Unusable("blank caption")
        try:
            return self._transform(raw.image, randomness), captions[which % len(captions)]
        except DecodeError as error:
            raise _Unusable(f"image cannot be decoded: {error}") from error

    def _read(self, index: int) -> RawSample:
        try:
            return self._reader.read(index)
        except OSError:
            pass  # once more: network file systems have short outages
        try:
            return self._reader.read(index)
        except OSError as error:
            raise _Unusable(f"read failed: {error}") from error

    def _describe(self, index: int, reason: str) -> BadSample:
        shard, _ = self._manifest.locate(index)
        try:
            key = self._reader.key(index)
        except OSError:  # the index could not be read, which is the reason given
            key = ""
        return BadSample(index, self._manifest.shards[shard].path, key, reason)


def iter_captions(
    manifest: Manifest, limit: int, captions: Sequence[str] = ("txt",), cache: ShardCache | None = None
) -> Iterator[str]:
    """Captions of up to `limit` samples, evenly spaced within at most 100 evenly spaced shards; samples without any
    are left out, and of several captions all count.

    The same ones for the same manifest, as long as all of its shards can be read; a warning names one that cannot.
    """
    sources = Captions(captions)
    reader = TarReader(manifest, sources.extensions, cache)
    filled = np.flatnonzero(manifest.sizes)
    shards = filled[_evenly_spaced(len(filled), _SHARDS_FOR_CAPTIONS)]
    sizes = manifest.sizes[shards]
    indices = indices_at(manifest.starts[shards], sizes, _evenly_spaced(int(sizes.sum()), limit))
    unreadable: set[int] = set()
    for index in indices.tolist():
        try:
            texts = reader.read(index, with_image=False).texts
        except OSError as error:
            shard, _ = manifest.locate(index)
            if shard not in unreadable:
                log.warning("captions of %s are left out: %s", manifest.shards[shard].path, error)
            unreadable.add(shard)
        else:
            yield from sources.of(texts)


def _evenly_spaced(n: int, count: int) -> np.ndarray:
    """min(n, count) different numbers of 0 ... n - 1, ascending."""
    count = min(n, count)
    return np.arange(count) * n // max(count, 1)
