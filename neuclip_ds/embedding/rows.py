"""Read and decode the samples of a shard for an encoder; what cannot be used is left out, with its reason."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neuclip_ds.data.captions import JSON, Captions
from neuclip_ds.data.dataset import Tokenize
from neuclip_ds.data.decoders import DecodeError
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import ChecksumError, TarReader
from neuclip_ds.data.transforms import ImageTransform
from neuclip_ds.data.uids import uid_text
from neuclip_ds.embedding.parts import IMAGE, TEXT


class Block(NamedTuple):
    """Neighbouring samples of a shard, which are encoded together."""

    shard: int  # number in the manifest
    start: int  # global index of the first one
    stop: int


class BadRow(NamedTuple):
    """A sample that cannot be used, and the reason."""

    key: str
    reason: str


class Rows(NamedTuple):
    """The b usable samples of a block."""

    block: Block
    image: Tensor | None  # uint8 (b, 3, H, W); None where only texts are encoded
    tokens: Tensor | None  # int64 (b, T); None where only images are encoded
    index: list[int]  # type: ignore[assignment]  # global indices
    key: list[str]
    uid: list[str | None]  # 32 hex digits
    bad: list[BadRow]
    unreadable: str | None = None  # why the shard cannot be read; the rows are empty then


def blocks_of(manifest: Manifest, shard: int, size: int) -> Iterator[Block]:
    """Yield the blocks of a shard, which depend on nothing else: an empty one if the shard has no samples."""
    start, stop = int(manifest.starts[shard]), int(manifest.starts[shard] + manifest.sizes[shard])
    for low in range(start, max(stop, start + 1), size):
        yield Block(shard, low, min(low + size, stop))


class RowReader:
    """Function from a block to its rows, for loader processes.

    Args:
        kinds: what is encoded, `image`, `text` or both; a sample without one of them is left out. Of several captions
            the first is taken.
        uid_key: key of the uid in a sample's JSON.
        options: caption sources and the cache of remote shards.
    """

    def __init__(
        self,
        manifest: Manifest,
        transform: ImageTransform,
        tokenize: Tokenize,
        kinds: Sequence[str],
        uid_key: str,
        options: LoaderOptions,
    ) -> None:
        self._manifest, self._transform, self._tokenize = manifest, transform, tokenize
        self._with_image, self._with_text, self._uid_key = IMAGE in kinds, TEXT in kinds, uid_key
        self._captions = Captions(options.captions)
        members = dict.fromkeys((*(self._captions.extensions if self._with_text else ()), JSON))
        self._reader = TarReader(manifest, tuple(members), options.cache)

    def __call__(self, block: Block) -> Rows:
        """Read a block.

        Raises:
            UserError: the shard differs from the manifest's description.
        """
        first = int(self._manifest.starts[block.shard])
        try:
            keys = self._reader.keys(block.shard, slice(block.start - first, block.stop - first))
            self._reader.announce(range(block.start, block.stop))
        except OSError as error:
            return Rows(block, None, None, [], [], [], [], str(error))
        images: list[Tensor] = []
        captions: list[str] = []
        rows = Rows(block, None, None, [], [], [], [])
        for index, key in zip(range(block.start, block.stop), keys, strict=True):
            try:
                image, caption, uid = self._sample(index)
            except ChecksumError as error:
                rows.bad.append(BadRow(key, f"checksum differs: {error}"))
            except OSError as error:
                return Rows(block, None, None, [], [], [], [], str(error))
            except (DecodeError, _Unusable) as error:
                rows.bad.append(BadRow(key, str(error)))
            else:
                images += [] if image is None else [image]
                captions += [] if caption is None else [caption]
                rows.index.append(index)
                rows.key.append(key)
                rows.uid.append(uid)
        side = self._transform.image_size
        pixels = torch.stack(images) if images else torch.zeros(0, 3, side, side, dtype=torch.uint8)
        return rows._replace(
            image=pixels if self._with_image else None,
            tokens=self._tokenize(captions) if self._with_text and captions else None,
        )

    def _sample(self, index: int) -> tuple[Tensor | None, str | None, str | None]:
        try:
            raw = self._reader.read(index, self._with_image)
        except ChecksumError:
            raise
        except OSError:  # network file systems have short outages
            raw = self._reader.read(index, self._with_image)
        image = caption = None
        if self._with_text:
            caption = next(iter(self._captions.of(raw.texts)), None)
            if caption is None:
                raise _Unusable("no caption")
        if self._with_image:
            if raw.image is None:
                raise _Unusable("no image")
            image = self._transform(raw.image)
        return image, caption, uid_text(raw.texts.get(JSON, b""), self._uid_key)


class _Unusable(Exception):
    """Raised for a bad sample; the message is the reason."""
