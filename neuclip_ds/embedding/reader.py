"""Read consecutive samples of a shard for encoding: the views of each image, and the token ids of its captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuclip_ds.data.dataset import BadSample, SampleReader, Tokenize, augmentation_seeds, caption_numbers
from neuclip_ds.data.decoders import JSON, Captions, DecodeError
from neuclip_ds.data.images import EvalTransform, RandomCrop
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.readers import ChecksumError, RawSample, TarReader, TooLarge


class Block(NamedTuple):
    """Consecutive samples of a shard that are read together."""

    shard: int  # number in the manifest
    start: int  # global index of the first sample
    stop: int


@dataclass(frozen=True, kw_only=True)
class CaptionRows:
    """The captions to encode, in the order of their n samples."""

    tokens: Tensor  # int64 (m, T)
    counts: Tensor  # int64 (n,), captions of each sample
    first: Tensor  # int32 (n,), number (from 0) of each sample's first encoded caption among all its captions


@dataclass(frozen=True, kw_only=True)
class BlockSamples:
    """The n usable samples of a block."""

    block: Block
    index: Tensor  # int64 (n,), global indices
    keys: Sequence[str] = ()
    uids: Sequence[str | None] = ()  # 32 hex digits; None if the sample's JSON is damaged
    views: Tensor | None = None  # uint8 (n, crops, 3, H, W); None if images are not encoded
    captions: CaptionRows | None = None  # None if captions are not encoded
    bad: Sequence[BadSample] = ()  # the samples that are omitted
    unreadable: str | None = None  # the reason why the shard cannot be read, if any


@dataclass(frozen=True, kw_only=True)
class _Sample:
    index: int
    views: list[Tensor]
    captions: list[str]
    first_caption: int


class RowReader:
    """Reads blocks in loader processes.

    Args:
        manifest: the dataset.
        options: options of the loader, with the sources of captions.
        transform: transforms images; None if images are not encoded.
        tokenize: converts captions; None if captions are not encoded.
        uid_key: key of the uid in a sample's JSON.
        crops: number N of random crops of each image, as training draws them in epochs 0 to N - 1; 0 for the evaluation
            crop. The `transform` must be a `RandomCrop` if N > 0.
        all_captions: whether all captions are encoded, instead of only the one that training draws in epoch 0.
        seed: seed of the crops and of the drawn captions.
    """

    def __init__(
        self,
        manifest: Manifest,
        options: LoaderOptions,
        *,
        transform: EvalTransform | RandomCrop | None,
        tokenize: Tokenize | None,
        uid_key: str = "uid",
        crops: int = 0,
        all_captions: bool = False,
        seed: int = 0,
    ) -> None:
        self._starts = manifest.starts
        self._transform = transform
        self._tokenize = tokenize
        self._uid_key = uid_key
        self._crops = crops
        self._all_captions = all_captions
        self._seed = seed
        self._captions = Captions(options.captions)
        members = self._captions.extensions if tokenize is not None else ()
        self._samples = SampleReader(manifest, members, options.cache)
        self._uids = TarReader(manifest, (JSON,), options.cache)

    def __call__(self, block: Block) -> BlockSamples:
        """Read a block's samples; raise UserError as in `SampleReader.read`, such as for a shard that has changed.

        If the shard cannot be read, the result contains no samples, and `unreadable` is set.
        """
        indices = range(block.start, block.stop)
        self._samples.prefetch(indices)
        samples: list[_Sample] = []
        bad: list[BadSample] = []
        for index in indices:
            sample = self._load(index)
            if isinstance(sample, _Sample):
                samples.append(sample)
                continue
            bad.append(self._samples.bad_sample(index, sample))
            if bad[-1].cause == "read failed":
                return self._unreadable(block, bad[-1].reason)
        usable = [sample.index for sample in samples]
        first_of_shard = int(self._starts[block.shard])
        rows_of_shard = slice(block.start - first_of_shard, block.stop - first_of_shard)
        try:
            keys_of_block = self._uids.keys(block.shard, rows_of_shard)
            uids = [self._uid(index) for index in usable]
        except OSError as error:
            return self._unreadable(block, str(error))
        return BlockSamples(
            block=block,
            index=torch.tensor(usable, dtype=torch.int64),
            keys=[keys_of_block[index - block.start] for index in usable],
            uids=uids,
            views=self._join_views(samples),
            captions=self._join_captions(samples),
            bad=bad,
        )

    def _unreadable(self, block: Block, reason: str) -> BlockSamples:
        return BlockSamples(block=block, index=torch.empty(0, dtype=torch.int64), unreadable=reason)

    def _load(self, index: int) -> "_Sample | str":
        """Return the views and the captions of a sample, or the reason why it cannot be used."""
        raw = self._samples.read(index, with_image=self._transform is not None)
        if isinstance(raw, str):
            return raw
        captions: list[str] = []
        first = 0
        if self._tokenize is not None:
            captions, first = self._choose_captions(index, raw)
            if not captions:
                return "blank caption" if raw.texts else "no caption"
        try:
            return _Sample(index=index, views=self._views(index, raw), captions=captions, first_caption=first)
        except DecodeError as error:
            return f"image cannot be decoded: {error}"

    def _choose_captions(self, index: int, raw: RawSample) -> tuple[list[str], int]:
        """Return the captions to encode, and the number of the first one among all captions of the sample."""
        if self._all_captions:
            return self._captions.all_captions(raw.texts), 0
        (number,) = caption_numbers(self._seed, 0, index).tolist()
        drawn = self._captions.draw(raw.texts, number)
        return ([], 0) if drawn is None else ([drawn.text], drawn.number)

    def _views(self, index: int, raw: RawSample) -> list[Tensor]:
        """Return the uint8 (3, H, W) views of a sample's image; raise DecodeError if it cannot be decoded."""
        if self._transform is None:
            return []
        assert raw.image is not None
        if isinstance(self._transform, RandomCrop):
            seeds = augmentation_seeds(self._seed, np.arange(self._crops), index).tolist()
            return self._transform.views(raw.image, seeds)
        return [self._transform(raw.image)]

    def _join_views(self, samples: Sequence[_Sample]) -> Tensor | None:
        if self._transform is None:
            return None
        side = self._transform.image_size
        views = torch.empty(len(samples), max(1, self._crops), 3, side, side, dtype=torch.uint8)
        for row, sample in enumerate(samples):
            for crop, pixels in enumerate(sample.views):
                views[row, crop] = pixels
        return views

    def _join_captions(self, samples: Sequence[_Sample]) -> CaptionRows | None:
        if self._tokenize is None:
            return None
        captions: list[str] = []
        for sample in samples:
            captions += sample.captions
        return CaptionRows(
            tokens=self._tokenize(captions),
            counts=torch.tensor([len(sample.captions) for sample in samples], dtype=torch.int64),
            first=torch.tensor([sample.first_caption for sample in samples], dtype=torch.int32),
        )

    def _uid(self, index: int) -> str | None:
        """Return the uid of a sample as 32 hex digits, or None if the JSON is damaged or too large."""
        try:
            high, low = self._uids.uid(index, self._uid_key)
        except (ChecksumError, TooLarge):
            return None
        return f"{high:016x}{low:016x}"
