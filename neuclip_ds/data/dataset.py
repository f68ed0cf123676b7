"""Turn (epoch, index) pairs into batches of tensors, in which the rows of unusable samples are marked as invalid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.decoders import Captions, CaptionSources, DecodeError, DrawnCaption
from neuclip_ds.data.feature_table import FeatureTable, StoredFeatures
from neuclip_ds.data.images import ImageTransform
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.order import hash64
from neuclip_ds.data.readers import ChecksumError, RawSample, TarReader, TooLarge
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.stored_towers import IMAGE, TEXT, loss_tables, reads_captions, reads_images
from neuclip_ds.errors import UserError
from neuclip_ds.limits import fix_of_limit

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
    """A batch of b rows, some of which may be invalid: rows of unusable samples, and padding rows (index -1).

    An invalid row has an all-zero image and an empty caption. If outputs of a frozen trunk are stored, they replace the
    images or captions; they are zero in invalid rows.
    """

    image: Tensor  # uint8 (b, 3, H, W), or floating-point (b, width) if the outputs of the image trunk are stored
    tokens: Tensor  # int64 (b, T), or floating-point (b, width) if the outputs of the text trunk are stored
    index: Tensor  # int64 (b,), global indices
    valid: Tensor  # bool (b,)
    bad: tuple[BadSample, ...] = ()
    stored: Mapping[str, StoredFeatures] = field(default_factory=dict)  # by the name of the table; zero in invalid rows

    def pin_memory(self) -> "Batch":
        """Return a copy of the batch in pinned memory."""
        return Batch(
            image=self.image.pin_memory(),
            tokens=self.tokens.pin_memory(),
            index=self.index.pin_memory(),
            valid=self.valid.pin_memory(),
            bad=self.bad,
            stored={name: features.pin_memory() for name, features in self.stored.items()},
        )


def augmentation_seeds(seed: int, epochs: ArrayLike, indices: ArrayLike) -> NDArray[np.uint64]:
    """Return the augmentation seeds (b,) of the samples with `indices` (b,) in the `epochs` (b,)."""
    return hash64(seed, epochs, indices)


def caption_numbers(seed: int, epochs: ArrayLike, indices: ArrayLike) -> NDArray[np.uint64]:
    """Return the random numbers (b,) that select captions of the samples with `indices` (b,) in the `epochs` (b,)."""
    return hash64(seed, epochs, indices, _WHICH_CAPTION)


class SampleReader:
    """Reads the stored bytes of samples, and describes samples that cannot be used.

    `members` are the extensions of the members that contain captions. Raises UserError if a shard is remote and there
    is no `cache`.
    """

    def __init__(self, manifest: Manifest, members: Sequence[str], cache: ShardCache | None = None) -> None:
        self._manifest = manifest
        self._reader = TarReader(manifest, members, cache)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start concurrent reads of the given samples, except samples of remote shards."""
        self._reader.prefetch_samples(indices)

    def read(self, index: int, with_image: bool = True) -> RawSample | str:
        """Return the bytes of a sample, or the reason why they cannot be used.

        Raises UserError if a limit of this machine prevents the read, or if `TarReader.read` raises it.
        """
        try:
            try:
                raw = self._reader.read(index, with_image)
            except OSError:
                raw = self._reader.read(index, with_image)  # retry once: network file systems have short outages
        except OSError as error:
            if fix := fix_of_limit(error):
                raise UserError(f"Sample {index} cannot be read ({error}); {fix}.") from error
            cause = "read failed"
            if isinstance(error, ChecksumError):
                cause = "checksum differs"
            elif isinstance(error, TooLarge):
                cause = "too large"
            return f"{cause}: {error}"
        if with_image and raw.image is None:
            return "no image"
        return raw

    def bad_sample(self, index: int, reason: str) -> BadSample:
        """Describe a sample that cannot be used."""
        shard, _ = self._manifest.locate(index)
        try:
            key = self._reader.key(index)
        except OSError:  # the shard's headers cannot be read, and `reason` already says so
            key = ""
        printable = key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return BadSample(index=index, shard=self._manifest.shards[shard].path, key=printable, reason=reason)


class PairDataset:
    """The image-caption pairs of a manifest. The contents of a batch depend only on its (epoch, index) pairs.

    `seed` seeds the augmentation and the choice among a sample's captions. Batches contain the rows of `tables`: the
    features of the drawn caption, and of the drawn crop if a table has random crops. With such a table, `random_crops`
    is the number N of crops, and epoch e augments images as epoch e mod N does; otherwise, `random_crops` is 0. The
    tables `image_features` and `text_features` replace the images and the captions, which are then not decoded or
    tokenized. With both of these tables, no samples are read from shards, unless the caption sources have weights.
    """

    def __init__(
        self,
        manifest: Manifest,
        transform: ImageTransform,
        tokenize: Tokenize,
        seed: int = 0,
        captions: CaptionSources = ("txt",),
        cache: ShardCache | None = None,
        tables: Mapping[str, FeatureTable] | None = None,
        random_crops: int = 0,
    ) -> None:
        self._manifest = manifest
        self._transform = transform
        self._tokenize = tokenize
        self._seed = seed
        self._captions = Captions(captions)
        self._tables = dict(tables or {})
        self._random_crops = random_crops
        self._reads_images = reads_images(self._tables)
        self._reads_captions = reads_captions(self._tables, captions)
        members = self._captions.extensions if self._reads_captions else ()
        self._samples = SampleReader(manifest, members, cache)

    @property
    def folder(self) -> str:
        """The path or URL of the first shard's folder, for use in messages."""
        return self._manifest.shards[0].path.rpartition("/")[0]

    def batch(self, items: Sequence[tuple[int, int]]) -> Batch:
        """Return a batch with one row per (epoch, index) pair; an index of -1 gives a padding row.

        Raises UserError in the same cases as `SampleReader.read` and `FeatureTable.rows`.
        """
        # the random numbers of each row: the seed of its augmentation, and the number that draws its caption
        epochs, indices = np.array(items, dtype=np.int64).reshape(-1, 2).T
        nonnegative_indices = np.maximum(indices, 0)  # `hash64` does not accept -1
        crops = epochs % self._random_crops if self._random_crops else epochs
        seeds = augmentation_seeds(self._seed, crops, nonnegative_indices)
        numbers = caption_numbers(self._seed, epochs, nonnegative_indices)

        side = self._transform.image_size
        images = torch.zeros(len(items) if self._reads_images else 0, 3, side, side, dtype=torch.uint8)
        captions = [""] * len(items)
        drawn_captions = torch.zeros(len(items), dtype=torch.int64)
        reasons: dict[int, str] = {}  # by row
        if self._reads_images or self._reads_captions:
            self._samples.prefetch(indices[indices != PADDING].tolist())
            # docs: batch
            for row in np.flatnonzero(indices != PADDING).tolist():
                pair = self._load_pair(int(indices[row]), int(seeds[row]), int(numbers[row]))
                if isinstance(pair, str):
                    reasons[row] = pair
                    continue
                if pair.pixels is not None:
                    images[row] = pair.pixels
                if pair.caption is not None:
                    captions[row] = pair.caption.text
                    drawn_captions[row] = pair.caption.number
            # docs: end

        # the stored features of the samples that could be read
        index = torch.from_numpy(indices.copy())
        is_read = index != PADDING
        is_read[list(reasons)] = False
        rows = is_read.nonzero().flatten()
        if not self._reads_captions:
            drawn_captions[rows] = self._tables[TEXT].draw_captions(index[rows], numbers[rows.numpy()])
        stored, problems = self._stored_features(index, rows, torch.from_numpy(crops), drawn_captions)
        stored_image = stored[IMAGE].image if IMAGE in stored else None
        stored_text = stored[TEXT].text if TEXT in stored else None

        # clear the rows of samples that cannot be used, because parts of these samples may have been read
        reasons.update(problems)
        valid = index != PADDING
        valid[list(reasons)] = False
        if self._reads_images:
            images[~valid] = 0
        for row in reasons:
            captions[row] = ""
        for features in stored.values():
            for values in (features.image, features.text):
                if values is not None:
                    values[~valid] = 0

        bad = [self._bad_sample(int(indices[row]), reason) for row, reason in sorted(reasons.items())]
        return Batch(
            image=images if stored_image is None else stored_image,
            tokens=self._tokenize(captions) if stored_text is None else stored_text,
            index=index,
            valid=valid,
            bad=tuple(bad),
            stored={name: stored[name] for name in loss_tables(self._tables)},
        )

    def _bad_sample(self, index: int, reason: str) -> BadSample:
        """Describe a sample that cannot be used, but do not fetch a remote shard only to find its key."""
        shard = self._manifest.shards[self._manifest.locate(index)[0]]
        reads_shard = self._reads_images or self._reads_captions
        if reads_shard or self._manifest.samples is not None or is_local(shard.path):
            return self._samples.bad_sample(index, reason)
        return BadSample(index=index, shard=shard.path, key="", reason=reason)

    def _stored_features(
        self, index: Tensor, rows: Tensor, crops: Tensor, captions: Tensor
    ) -> tuple[dict[str, StoredFeatures], dict[int, str]]:
        """Return each table's features of the batch's `rows`, and the reason for each row that a table cannot provide.

        `index`, `crops` and `captions` are (b,) tensors of the whole batch. The features also have b rows, which are
        zero except at `rows`.
        """
        stored: dict[str, StoredFeatures] = {}
        problems: dict[int, str] = {}
        for name, table in self._tables.items():
            crops_of_rows = crops[rows] if table.has_random_crops else None
            features, problems_of_table = table.rows(index[rows], crops_of_rows, captions[rows])
            stored[name] = StoredFeatures(
                image=_spread(features.image, rows, len(index)), text=_spread(features.text, rows, len(index))
            )
            for number, problem in problems_of_table.items():
                problems.setdefault(int(rows[number]), f"{problem} ({table.folder})")
        return stored, problems

    def _load_pair(self, index: int, augmentation_seed: int, caption_number: int) -> "_Pair | str":
        """Return the pixels and the caption of a sample, or the reason why the sample cannot be used."""
        raw = self._samples.read(index, self._reads_images)
        if isinstance(raw, str):
            return raw
        caption = None
        if self._reads_captions:
            if not raw.texts:
                return "no caption"
            caption = self._captions.draw(raw.texts, caption_number)
            if caption is None:
                return "blank caption"
        pixels = None
        if raw.image is not None:
            try:
                pixels = self._transform(raw.image, augmentation_seed)
            except DecodeError as error:
                return f"image cannot be decoded: {error}"
        return _Pair(pixels=pixels, caption=caption)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """The parts of a sample that training uses."""

    pixels: Tensor | None  # uint8 (3, H, W); None if training reads no images
    caption: DrawnCaption | None  # None if training reads no captions


def _spread(values: Tensor | None, rows: Tensor, size: int) -> Tensor | None:
    """Return a (size, d) tensor: `values` at their `rows`, and zeros elsewhere; None if `values` is None."""
    if values is None:
        return None
    result = values.new_zeros(size, values.shape[1])
    result[rows] = values
    return result
