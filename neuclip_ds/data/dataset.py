"""Turn (epoch, index) pairs into a batch of tensors; an unusable sample keeps its row, with valid = False."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.captions import Captions, CaptionSources
from neuclip_ds.data.decoders import DecodeError
from neuclip_ds.data.hashing import hash64
from neuclip_ds.data.manifest import Manifest, indices_at
from neuclip_ds.data.readers import READERS, ChecksumError, RawSample, TarReader
from neuclip_ds.data.transforms import ImageTransform

log = logging.getLogger(__name__)

Tokenize = Callable[[list[str]], Tensor]  # b captions to int64 (b, T); can be pickled
PADDING = -1  # index of a row without a sample
_SHARDS_FOR_CAPTIONS = 100
_WHICH_CAPTION = 1  # separates the hash that draws a caption from that of the augmentation


class BadSample(NamedTuple):
    """A sample that could not be used, and the reason."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    shard: str
    key: str
    reason: str  # CAUSE, or CAUSE: DETAILS

    @property
    def cause(self) -> str:
        """The kind of error, by which bad samples are counted."""
        return self.reason.partition(":")[0]


class Batch(NamedTuple):
    """A batch of b rows. Invalid rows have a zero image and an empty caption; those with index -1 are padding."""

    image: Tensor  # uint8 (b, 3, H, W)
    tokens: Tensor  # int64 (b, T)
    index: Tensor  # type: ignore[assignment]  # int64 (b,), global indices
    valid: Tensor  # bool (b,)
    bad: tuple[BadSample, ...] = ()


class _Unusable(Exception):
    """Raised for a bad sample; the message is the reason."""


class PairDataset(Dataset[Batch]):
    """Map-style dataset: `dataset.__getitems__([(epoch, index), ...])` returns a Batch that depends on nothing else.

    Args:
        seed: seed of augmentation and of the choice among several captions.
        captions: caption sources, as `data.captions`.
        cache: cache of remote shards.
    """

    def __init__(
        self,
        manifest: Manifest,
        transform: ImageTransform,
        tokenize: Tokenize,
        *,
        seed: int = 0,
        captions: CaptionSources = ("txt",),
        reader: Literal["tar", "webdataset"] = "tar",
        cache: ShardCache | None = None,
    ) -> None:
        self._manifest, self._transform, self._tokenize, self._seed = manifest, transform, tokenize, seed
        self._captions = Captions(captions)
        self._reader = READERS[reader](manifest, self._captions.extensions, cache)

    @property
    def folder(self) -> Path:
        """Folder of the first shard, for messages."""
        return Path(self._manifest.shards[0].path).parent

    def __len__(self) -> int:
        return self._manifest.n

    def __getitem__(self, item: tuple[int, int]) -> Batch:
        return self.__getitems__([item])

    def __getitems__(self, items: Sequence[tuple[int, int]]) -> Batch:
        """Return the batch of these (epoch, index) rows, where index -1 gives an empty one.

        Raises:
            UserError: a shard differs from the manifest's description.
        """
        side = self._transform.image_size
        images = torch.zeros(len(items), 3, side, side, dtype=torch.uint8)
        captions, valid, bad = [""] * len(items), torch.zeros(len(items), dtype=torch.bool), []
        epochs, indices = np.array(items, dtype=np.int64).reshape(-1, 2).T
        known = np.maximum(indices, 0)
        seeds = hash64(self._seed, epochs, known).tolist()
        which = hash64(self._seed, epochs, known, _WHICH_CAPTION).tolist()
        self._reader.announce(indices[indices != PADDING].tolist())
        for row, index in enumerate(indices.tolist()):
            if index == PADDING:
                continue
            try:
                images[row], captions[row] = self._pair(index, seeds[row], which[row])
                valid[row] = True
            except _Unusable as error:
                bad.append(self._describe(index, str(error)))
        return Batch(images, self._tokenize(captions), torch.from_numpy(indices.copy()), valid, tuple(bad))

    def original(self, index: int) -> tuple[bytes, str] | None:
        """Return a sample's image file and the caption that it has in the first epoch; None if it cannot be used."""
        try:
            return self._stored(index, int(hash64(self._seed, 0, np.array([index]), _WHICH_CAPTION)[0]))
        except _Unusable:
            return None

    def _pair(self, index: int, seed: int, which: int) -> tuple[Tensor, str]:
        image, caption = self._stored(index, which)
        try:
            return self._transform(image, seed), caption
        except DecodeError as error:
            raise _Unusable(f"image cannot be decoded: {error}") from error

    def _stored(self, index: int, which: int) -> tuple[bytes, str]:
        raw = self._read(index)
        if raw.image is None:
            raise _Unusable("no image")
        if not raw.texts:
            raise _Unusable("no caption")
        caption = self._captions.draw(raw.texts, which)
        if caption is None:
            raise _Unusable("blank caption")
        return raw.image, caption

    def _read(self, index: int) -> RawSample:
        try:
            return self._reader.read(index)
        except OSError:
            pass  # retry once: network file systems have short outages
        try:
            return self._reader.read(index)
        except ChecksumError as error:
            raise _Unusable(f"checksum differs: {error}") from error
        except OSError as error:
            raise _Unusable(f"read failed: {error}") from error

    def _describe(self, index: int, reason: str) -> BadSample:
        shard, _ = self._manifest.locate(index)
        try:
            key = self._reader.key(index)
        except OSError:  # the shard's headers cannot be read, which is the reason given
            key = ""
        printable = key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return BadSample(index, self._manifest.shards[shard].path, printable, reason)


def iter_captions(
    manifest: Manifest, limit: int, captions: CaptionSources = ("txt",), cache: ShardCache | None = None
) -> Iterator[str]:
    """Yield all captions of up to `limit` samples, evenly spaced within at most 100 evenly spaced shards.

    The captions are the same for the same manifest, unless a shard cannot be read, which is logged as a warning.
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
                log.warning(
                    "cannot read captions of shard %s, which is skipped: %s", manifest.shards[shard].path, error
                )
            unreadable.add(shard)
        else:
            yield from sources.of(texts)


def _evenly_spaced(n: int, count: int) -> np.ndarray:
    """Return min(n, count) different numbers of 0 ... n - 1 in ascending order."""
    count = min(n, count)
    return np.arange(count) * n // max(count, 1)
