"""Find the images and captions that are nearest to a text or an image, and classify images by class names.

Searches are exact: usearch compares the query with all features, without an index that has to be built or tuned.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from neuclip_ds.data.decoders import DecodeError
from neuclip_ds.data.feature_table import FeatureTable, Stored
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.data.manifest import Manifest
from neuclip_ds.data.worker_pool import WorkerPool
from neuclip_ds.embedding.collection import Collection
from neuclip_ds.embedding.embed import encode_by_length
from neuclip_ds.embedding.encoders import FeatureEncoders
from neuclip_ds.errors import UserError, explained
from neuclip_ds.evaluation.sets import PLACEHOLDER

log = logging.getLogger(__name__)

# minimum cosine similarity of a stored feature to the model's; features of a model in bfloat16 are above it
_REPRODUCED = 0.99


@dataclass(frozen=True, kw_only=True)
class Match:
    """An image or caption, and its cosine similarity to a query."""

    index: int  # number of the image in the collection
    similarity: float


@dataclass(frozen=True, kw_only=True)
class ClassScore:
    """A class, and how well its prompt fits an image."""

    name: str
    similarity: float  # cosine
    probability: float  # among the classes, at the model's temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """L2-normalized features of n images or captions of a collection."""

    index: NDArray[np.int64]  # (n,), numbers of the images
    values: NDArray[np.floating]  # (n, d), float16 or float32

    def nearest(self, query: Tensor, count: int) -> list[Match]:
        """Return the up to `count` matches that are most similar to an L2-normalized (d,) query, the best one first."""
        from usearch.index import MetricKind, search  # an optional package

        count = min(count, len(self.index))
        if not count:
            return []
        query_values = query.cpu().numpy().astype(self.values.dtype)
        result = search(self.values, query_values, count, MetricKind.IP, exact=True)
        matches = []
        for row, distance in zip(result.keys.tolist(), result.distances.tolist(), strict=True):
            matches.append(Match(index=int(self.index[row]), similarity=1 - distance))
        return matches


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectionFeatures:
    """A model's features of the usable images and captions in a collection."""

    images: Features
    captions: Features


class SearchableModel:
    """A model that encodes queries and classifies images, with its features of a collection's images and captions.

    Args:
        name: display name.
        encoders: encoders of images and of captions in one space.
        temperature: divisor of the cosine similarities before the softmax over classes.
        features: features of the collection.

    Attributes:
        name: display name.
        features: features of the collection.
    """

    def __init__(self, name: str, encoders: FeatureEncoders, temperature: float, features: CollectionFeatures) -> None:
        self.name = name
        self._temperature = temperature
        self.features = features
        self._encoders = encoders
        self._transform = transform_of(encoders)

    def encode_text(self, text: str) -> Tensor:
        """Return the L2-normalized feature (d,) of a text."""
        return self._encode_texts([text])[0]

    def encode_image(self, image: bytes) -> Tensor:
        """Return the L2-normalized feature (d,) of an encoded image; raise DecodeError if it cannot be decoded."""
        assert self._encoders.image is not None
        pixels = self._transform(image).unsqueeze(0)
        return functional.normalize(self._encoders.image(pixels), dim=1)[0]

    def classify(self, image: bytes, names: Sequence[str], template: str) -> list[ClassScore]:
        """Return the score of each class, the highest first.

        Args:
            image: encoded image.
            names: names of the classes, at least one.
            template: prompt, with `{c}` in place of the name.

        Raises:
            DecodeError: the image cannot be decoded.
        """
        prompts = [template.replace(PLACEHOLDER, name) for name in names]
        similarities = self._encode_texts(prompts) @ self.encode_image(image)
        probabilities = functional.softmax(similarities / self._temperature, dim=0)
        scores = []
        for name, similarity, probability in zip(names, similarities.tolist(), probabilities.tolist(), strict=True):
            scores.append(ClassScore(name=name, similarity=similarity, probability=probability))
        return sorted(scores, key=lambda score: score.similarity, reverse=True)

    def _encode_texts(self, texts: Sequence[str]) -> Tensor:
        assert self._encoders.text is not None and self._encoders.tokenize is not None
        tokens = self._encoders.tokenize(list(texts))
        return functional.normalize(encode_by_length(self._encoders.text, tokens, len(tokens)), dim=1)


def check_features(model: SearchableModel, collection: Collection, folder: str) -> None:
    """Raise UserError if the model does not reproduce the first image feature in a folder of features.

    Also raises UserError if that image cannot be read or decoded.
    """
    images = model.features.images
    number = int(images.index[0])
    name = collection.name(number)
    with explained(f"Image {name} cannot be read or decoded", "check the image and the storage"):
        feature = model.encode_image(collection.read(number).image).cpu()
    stored = torch.from_numpy(images.values[0]).float()
    problem = "different widths"
    if feature.shape == stored.shape:
        similarity = float(feature @ stored)
        if similarity >= _REPRODUCED:
            return
        problem = f"a cosine similarity of {similarity:.3f}"
    raise UserError(
        f"The features in {folder} are not those of {model.name}: the stored and the computed feature of image {name} "
        f"have {problem}. The model or the data has changed since the features were written: run `neuclip-ds embed` "
        "again, with another --out."
    )


def transform_of(encoders: FeatureEncoders) -> EvalTransform:
    """Return the evaluation transform that a model's images need."""
    assert encoders.preprocessing is not None
    return EvalTransform.of(encoders.preprocessing)


@dataclass(frozen=True, kw_only=True)
class _EncoderInput:
    """The usable images in a range of a collection, and their captions."""

    pixels: Tensor  # uint8 (b, 3, H, W)
    index: list[int]  # numbers of the b images
    captions: list[str]
    caption_index: list[int]  # numbers of the images with a caption
    unusable: list[str]  # reasons why images are omitted


class _RangeReader:
    """Reads ranges of a collection in loader processes."""

    def __init__(self, collection: Collection, transform: EvalTransform) -> None:
        self._collection = collection
        self._transform = transform

    def __call__(self, numbers: range) -> _EncoderInput:
        pixels = []
        index = []
        captions = []
        caption_index = []
        unusable = []
        for number in numbers:
            try:
                sample = self._collection.read(number)
                pixels.append(self._transform(sample.image))
            except (OSError, DecodeError) as error:
                unusable.append(str(error))
                continue
            index.append(number)
            if sample.caption is not None:
                captions.append(sample.caption)
                caption_index.append(number)
        side = self._transform.image_size
        return _EncoderInput(
            pixels=torch.stack(pixels) if pixels else torch.empty(0, 3, side, side, dtype=torch.uint8),
            index=index,
            captions=captions,
            caption_index=caption_index,
            unusable=unusable,
        )


def encode_collection(
    collection: Collection,
    encoders: FeatureEncoders,
    options: LoaderOptions,
    batch_size: int,
    report: Callable[[int, int], None],
) -> CollectionFeatures:
    """Encode all images and captions of a collection; images that cannot be used are omitted with a warning.

    Args:
        collection: the images.
        encoders: a model with encoders of images and of captions in one space.
        options: options of the loader processes.
        batch_size: number of images that are encoded at once.
        report: function that is called with the number of images done and the total number of images.

    Raises:
        UserError: no image can be read and decoded, a shard differs from its manifest, or as in `WorkerPool.run`.
    """
    assert encoders.image is not None and encoders.text is not None and encoders.tokenize is not None
    images: list[Tensor] = []
    captions: list[Tensor] = []
    index: list[int] = []
    caption_index: list[int] = []
    unusable: Counter[str] = Counter()
    total = len(collection)

    def ranges() -> Iterator[range]:
        for start in range(0, total, batch_size):
            yield range(start, min(start + batch_size, total))

    with closing(WorkerPool(_RangeReader(collection, transform_of(encoders)), options)) as pool:
        for number, batch in enumerate(pool.run(ranges(), "batch {} of the images".format)):
            if batch.index:
                images.append(encoders.image(batch.pixels).cpu())
            if batch.captions:
                tokens = encoders.tokenize(batch.captions)
                captions.append(encode_by_length(encoders.text, tokens, batch_size).cpu())
            index += batch.index
            caption_index += batch.caption_index
            unusable.update(batch.unusable)
            report(min((number + 1) * batch_size, total), total)
    if unusable:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in unusable.most_common(3))
        log.warning("omitted %d of %d images: %s", unusable.total(), total, reasons)
    if not index:
        reason = next(iter(unusable), "the dataset is empty")
        raise UserError(f"None of the {total} images can be used: {reason}; check --images.")
    return CollectionFeatures(images=_features(index, images), captions=_features(caption_index, captions))


def _features(index: list[int], rows: list[Tensor]) -> Features:
    """Join the rows of features, of which there may be none, and normalize them."""
    values = functional.normalize(torch.cat(rows), dim=1) if rows else torch.empty(0, 0)
    return Features(index=np.array(index, dtype=np.int64), values=values.numpy())


def read_features(stored: Stored, model: str, manifest: Manifest) -> CollectionFeatures:
    """Read the features of a dataset that `neuclip-ds embed` wrote.

    Args:
        stored: result of `find_table` for a local folder.
        model: the model's name as `embed` records it.
        manifest: the dataset.

    Raises:
        UserError: the features were computed with another model, with the moving average of the model's weights or from
            other data; are incomplete or cannot be read; are not in a joint space of images and captions; were computed
            from random crops; or are all unusable.
    """
    folder = stored["folder"]
    embedding = stored["embedding"]
    of_average = embedding["ema"]
    if embedding["model"] == model and of_average:
        raise UserError(
            f"The features in {folder} were computed with the moving average of {model}'s weights, but this command "
            "uses the weights themselves: embed the data without --ema into another folder."
        )
    if embedding["model"] != model:
        raise UserError(
            f"The features in {folder} were computed with {embedding['model']}, not with {model}: pass the folders in "
            f"--features in the order of the models, or embed the data with {model}."
        )
    if embedding["output"] != "joint":
        raise UserError(f"The features in {folder} are not in a joint space: embed the data without --output=trunk.")
    if embedding["crops"]:
        raise UserError(f"The features in {folder} were computed from random crops: embed the data without --crops.")
    table = FeatureTable(stored, manifest, embedding["captions"])
    numbers = torch.arange(manifest.n)
    rows, problems = table.rows(numbers)
    is_usable = np.ones(manifest.n, dtype=bool)
    is_usable[list(problems)] = False
    if not is_usable.any():
        raise UserError(
            f"{folder} contains no usable features: {next(iter(problems.values()), 'the dataset is empty')}; check the "
            "images, and run `neuclip-ds embed` again."
        )
    index = numbers.numpy()[is_usable]
    image, text = rows.pair()
    return CollectionFeatures(
        images=Features(index=index, values=image.numpy()[is_usable]),
        captions=Features(index=index, values=text.numpy()[is_usable]),
    )
