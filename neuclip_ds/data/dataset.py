"""Turn (epoch, index) pairs into batches of tensors, in which the rows of unusable samples are marked as invalid."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.decoders import Captions, CaptionSources, DecodeError
from neuclip_ds.data.images import ImageTransform
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import hash64
from neuclip_ds.data.readers import ChecksumError, TarReader

Tokenize = Callable[[list[str]], Tensor]  # maps b captions to int64 (b, T); picklable
PADDING = -1  # index of a row that has no sample
_WHICH_CAPTION = 1  # extra input to the hash that draws captions, so that it differs from the augmentation's hash


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """A sample that could not be used, and the reason."""

    index: int
    shard: str
    key: str
    reason: str  # "CAUSE" or "CAUSE: DETAILS"

    @property
    def cause(self) -> str:
        """The category of the error; bad samples are counted by category."""
        return self.reason.partition(":")[0]


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of b rows. An invalid row has an all-zero image and an empty caption; a row with index -1 is padding."""

    image: Tensor  # uint8 (b, 3, H, W)
    tokens: Tensor  # int64 (b, T)
    index: Tensor  # int64 (b,), global indices
    valid: Tensor  # bool (b,)
    bad: tuple[BadSample, ...] = ()

    def pin_memory(self) -> "Batch":
        """Return a copy of the batch in pinned memory."""
        return Batch(
            image=self.image.pin_memory(),
            tokens=self.tokens.pin_memory(),
            index=self.index.pin_memory(),
            valid=self.valid.pin_memory(),
            bad=self.bad,
        )


class PairDataset:
    """The image-caption pairs of a manifest. The contents of a batch depend only on its (epoch, index) pairs.

    `seed` seeds the augmentation and the choice among a sample's captions.
    """

    def __init__(
        self,
        manifest: Manifest,
        transform: ImageTransform,
        tokenize: Tokenize,
        seed: int = 0,
        captions: CaptionSources = ("txt",),
        cache: ShardCache | None = None,
    ) -> None:
        self._manifest = manifest
        self._transform = transform
        self._tokenize = tokenize
        self._seed = seed
        self._captions = Captions(captions)
        self._reader = TarReader(manifest, self._captions.extensions, cache)

    @property
    def folder(self) -> Path:
        """The folder of the first shard, for use in messages."""
        return Path(self._manifest.shards[0].path).parent

    def batch(self, items: Sequence[tuple[int, int]]) -> Batch:
        """Return a batch with one row per (epoch, index) pair; an index of -1 gives a padding row.

        Raises UserError if a shard differs from its description in the manifest.
        """
        # the random numbers of each row: the seed of its augmentation, and the number that draws its caption
        epochs, indices = np.array(items, dtype=np.int64).reshape(-1, 2).T
        nonnegative_indices = np.maximum(indices, 0)  # `hash64` takes no padding
        augmentation_seeds = hash64(self._seed, epochs, nonnegative_indices).tolist()
        caption_numbers = hash64(self._seed, epochs, nonnegative_indices, _WHICH_CAPTION).tolist()

        side = self._transform.image_size
        images = torch.zeros(len(items), 3, side, side, dtype=torch.uint8)
        captions = [""] * len(items)
        valid = torch.zeros(len(items), dtype=torch.bool)
        bad = []
        self._reader.prefetch_samples(indices[indices != PADDING].tolist())
        for row in np.flatnonzero(indices != PADDING).tolist():
            index = int(indices[row])
            pair = self._load_pair(index, augmentation_seeds[row], caption_numbers[row])
            if isinstance(pair, str):
                bad.append(self._bad_sample(index, pair))
            else:
                images[row], captions[row] = pair
                valid[row] = True
        return Batch(
            image=images,
            tokens=self._tokenize(captions),
            index=torch.from_numpy(indices.copy()),
            valid=valid,
            bad=tuple(bad),
        )

    def _load_pair(self, index: int, augmentation_seed: int, caption_number: int) -> tuple[Tensor, str] | str:
        """Return the pixels and the caption of a sample, or the reason why the sample cannot be used."""
        try:
            try:
                raw = self._reader.read(index)
            except OSError:
                raw = self._reader.read(index)  # retry once: network file systems have short outages
        except OSError as error:
            cause = "checksum differs" if isinstance(error, ChecksumError) else "read failed"
            return f"{cause}: {error}"
        if raw.image is None:
            return "no image"
        if not raw.texts:
            return "no caption"
        caption = self._captions.draw(raw.texts, caption_number)
        if caption is None:
            return "blank caption"
        try:
            return self._transform(raw.image, augmentation_seed), caption
        except DecodeError as error:
            return f"image cannot be decoded: {error}"

    def _bad_sample(self, index: int, reason: str) -> BadSample:
        shard, _ = self._manifest.locate(index)
        try:
            key = self._reader.key(index)
        except OSError:  # the shard's headers cannot be read, and `reason` already says so
            key = ""
        printable = key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return BadSample(index=index, shard=self._manifest.shards[shard].path, key=printable, reason=reason)
