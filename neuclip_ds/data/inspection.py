"""Inspect a sample of a dataset's pairs before training: sizes, token counts, repeated content and unusable samples."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.dataset import SampleReader
from neuclip_ds.data.decoders import Captions, CaptionSources, DecodeError, read_header
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.open_data import evenly_spaced_indices

_TRUNCATED_SHARE = 0.2  # share of truncated captions above which a warning is given
_REPEATED_SHARE = 0.5  # share of repeated captions or images above which a warning is given
_FEWEST = 20  # fewest captions or images for which such a warning is given
_PADDED = "a"  # a caption that is shorter than any context


@dataclass(frozen=True, kw_only=True)
class CaptionLengths:
    """Lengths of n captions in a tokenizer's tokens."""

    tokens: NDArray[np.int64]  # (n,) tokens without padding, at most the context
    truncated: NDArray[np.bool_]  # (n,) whether the end of the caption is cut off
    context: int

    @property
    def truncated_share(self) -> float:
        """Share of captions whose end is cut off."""
        return float(self.truncated.mean()) if len(self.truncated) else 0.0


@dataclass(frozen=True, kw_only=True)
class ExamplePair:
    """A pair for a contact sheet."""

    index: int
    image: bytes  # encoded
    captions: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Statistics of a sample of pairs, with examples."""

    read: int  # samples that were read
    total: int  # samples in the dataset
    sides: NDArray[np.int64]  # (m, 2) width and height in pixels of the usable samples' images
    captions: Sequence[str]  # all captions of the usable samples
    repeated_images: int  # images with the same bytes as an earlier one
    unusable: Counter[str]  # samples found to be unusable, which training would skip, by cause
    examples: Sequence[ExamplePair]


def inspect_pairs(
    manifest: Manifest, limit: int, examples: int, captions: CaptionSources = ("txt",), cache: ShardCache | None = None
) -> Inspection:
    """Return statistics of up to `limit` samples, with up to `examples` of their pairs.

    `evenly_spaced_indices` chooses the samples. Only the headers of images are decoded, so an image with damaged pixel
    data counts as usable.

    Raises UserError if a caption source is invalid, if there are remote shards but no `cache`, or in the same cases as
    `SampleReader.read`.
    """
    sources = Captions(captions)
    reader = SampleReader(manifest, sources.extensions, cache)
    indices = evenly_spaced_indices(manifest, limit)
    example_every = max(1, len(indices) // max(examples, 1))
    sides: list[tuple[int, int]] = []
    all_captions: list[str] = []
    image_counts: Counter[bytes] = Counter()
    unusable: Counter[str] = Counter()
    kept: list[ExamplePair] = []
    for number, index in enumerate(indices.tolist()):
        raw = reader.read(index)
        if isinstance(raw, str):
            unusable[raw.partition(":")[0]] += 1
            continue
        texts = sources.all_captions(raw.texts)
        if not texts:
            unusable["no caption"] += 1
            continue
        assert raw.image is not None  # the reader gives a reason instead
        try:
            header = read_header(raw.image)
        except DecodeError:
            unusable["image cannot be decoded"] += 1
            continue
        sides.append(header.size)
        all_captions += texts
        image_counts[blake2b(raw.image, digest_size=16).digest()] += 1
        if number % example_every == 0 and len(kept) < examples:
            kept.append(ExamplePair(index=index, image=raw.image, captions=texts))
    return Inspection(
        read=len(indices),
        total=manifest.n_used,
        sides=np.array(sides, dtype=np.int64).reshape(-1, 2),
        captions=all_captions,
        repeated_images=image_counts.total() - len(image_counts),
        unusable=unusable,
        examples=kept,
    )


def caption_lengths(captions: Sequence[str], tokenize: Callable[[list[str]], Tensor], context: int) -> CaptionLengths:
    """Count the tokens of n captions with a tokenizer that truncates and pads.

    A caption counts as truncated if its last word does not change the tokens. This works with every such tokenizer, but
    does not detect truncated captions of one word, or captions whose last word is only partly cut off.
    """
    shortened = [caption.rpartition(" ")[0] for caption in captions]
    ids = tokenize([*captions, *shortened, _PADDED]).numpy()
    rows = ids[: len(captions)]
    has_words = np.array([bool(text.strip()) for text in shortened], dtype=bool)
    padding = ids[-1, -1]
    return CaptionLengths(
        tokens=(rows != padding).sum(axis=1),
        truncated=has_words & (rows == ids[len(captions) : -1]).all(axis=1),
        context=context,
    )


def repeated_captions(captions: Sequence[str]) -> int:
    """Return how many captions are equal to an earlier caption."""
    return len(captions) - len(set(captions))


def pair_warnings(
    captions: Sequence[str], lengths: CaptionLengths, repeated_images: int = 0, images: int = 0
) -> list[str]:
    """Return a warning for each property of a sample of pairs that is likely to harm training.

    Args:
        captions: captions of the sample.
        lengths: their lengths in tokens.
        repeated_images: how many of the images have the same bytes as an earlier one.
        images: number of images.
    """
    warnings: list[str] = []
    if len(captions) >= _FEWEST and lengths.truncated_share > _TRUNCATED_SHARE:
        warnings.append(
            f"{lengths.truncated_share:.0%} of {len(captions):,} captions are cut off after {lengths.context} tokens: "
            "use a text tower with a longer context (model.text.context_length), or shorter captions."
        )
    if len(captions) >= _FEWEST and repeated_captions(captions) > _REPEATED_SHARE * len(captions):
        (most_common, count), *_ = Counter(captions).most_common(1)
        warnings.append(
            f"Only {len(set(captions)):,} of {len(captions):,} captions are distinct ({most_common[:60]!r} occurs "
            f"{count:,} times): equal captions are negatives of each other. Check data.captions and the data."
        )
    if images >= _FEWEST and repeated_images > _REPEATED_SHARE * images:
        warnings.append(
            f"Only {images - repeated_images:,} of {images:,} images are distinct: equal images are negatives of each "
            "other. Put all captions of an image into one sample, as neuclip-ds pack does."
        )
    return warnings


def size_warnings(batch_size: int, samples: int) -> list[str]:
    """Return a list with a warning if one batch needs more samples than the dataset has, else an empty list."""
    if batch_size <= samples:
        return []
    return [
        f"data.batch_size={batch_size:,} exceeds the {samples:,} training pairs, so an epoch is a single step. Choose "
        f"at most {max(2, samples // 10):,}."
    ]
