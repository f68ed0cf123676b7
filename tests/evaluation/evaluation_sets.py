"""Small evaluation sets on disk, and a model that computes its features from pixels and tokens."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tars import write_tar
from torch import Tensor
from torch.nn import functional

DIM = 24
Members = dict[str, bytes]


class Labeled(NamedTuple):
    """Pixel values, labels and metadata of a labeled set, in the order in which the shards store them."""

    features: Tensor  # (n, DIM) pixel values of the images
    labels: Tensor  # (n,)
    metadata: Tensor  # (n, 3)


def write_shards(folder: Path, samples: Sequence[Members], shards: int = 2) -> Path:
    """Write test/nshards.txt and the tars, and return `folder`; neighboring samples are in different shards."""
    (folder / "test").mkdir(parents=True, exist_ok=True)
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    for shard in range(shards):
        members = []
        for index in range(shard, len(samples), shards):
            members += [(f"s{index:07d}.{extension}", data) for extension, data in samples[index].items()]
        write_tar(folder / "test" / f"{shard}.tar", members)
    return folder


def write_prompts(folder: Path, classes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classnames.txt").write_text("".join(f"name {number}\n" for number in range(classes)))
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of {c}\nart of {c}.\n")


def labeled_set(folder: Path, count: int, classes: int = 6, metadata: Tensor | None = None) -> Labeled:
    """Write a labeled set whose features are class features plus noise, so that many predictions are correct."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(0, classes, (count,), generator=generator)
    features = pixel_features(torch.randn(count, DIM, generator=generator) + 2 * torch.eye(DIM)[labels])
    rows = torch.zeros((count, 3), dtype=torch.int64) if metadata is None else metadata
    write_prompts(folder, classes)
    samples = [
        {"jpg": image_of(feature), "cls": str(int(label)).encode(), "npy": npy(row)}
        for feature, label, row in zip(features, labels, rows, strict=True)
    ]
    write_shards(folder, samples)
    order = stored_order(count)
    return Labeled(features[order], labels[order], rows[order])


def captioned_set(folder: Path, captions: Sequence[int], noise: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Write `captions[i]` captions for image i; return images, captions (m, DIM), and each caption's image (m,)."""
    generator = torch.Generator().manual_seed(len(captions))
    raw = torch.randn(len(captions), DIM, generator=generator)
    images = pixel_features(raw)
    samples = []
    texts = []
    image_of_text = []
    for image, count in enumerate(captions):
        texts_of_image = pixel_features(raw[image] + noise * torch.randn(count, DIM, generator=generator))
        samples.append({"png": image_of(images[image]), "txt": "\n".join(map(words_of, texts_of_image)).encode()})
        texts.append(texts_of_image)
        image_of_text += [image] * count
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_type.txt").write_text("retrieval\n")
    write_shards(folder, samples)
    return images, torch.cat(texts), torch.tensor(image_of_text)


def winogavil_set(folder: Path, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Write a set of instances; return each one's cue (DIM,), candidates (n, DIM) and mask of associations (n,)."""
    generator = torch.Generator().manual_seed(len(sizes))
    samples = []
    instances = []
    for size in sizes:
        cue = pixel_features(torch.randn(1, DIM, generator=generator))[0]
        images = pixel_features(torch.randn(size, DIM, generator=generator))
        is_associated = torch.zeros(size, dtype=torch.bool)
        is_associated[torch.randperm(size, generator=generator)[: size // 2]] = True
        candidates = [f"image {number}" for number in range(size)]
        associations = [candidates[number] for number in is_associated.nonzero().flatten().tolist()]
        tree = {"cue": words_of(cue), "candidates": candidates, "associations": associations}
        members = {"json": json.dumps(tree).encode()}
        for number, image in enumerate(images):
            members[f"{number}.webp"] = image_of(image)
        samples.append(members)
        instances.append((cue, images, is_associated))
    write_shards(folder, samples)
    return instances


def stored_order(count: int, shards: int = 2) -> list[int]:
    """Return the indices of samples in the order in which `write_shards` stores them."""
    order: list[int] = []
    for shard in range(shards):
        order += range(shard, count, shards)
    return order


def npy(row: Tensor) -> bytes:
    out = io.BytesIO()
    np.save(out, row.numpy())
    return out.getvalue()


def pixel_features(raw: Tensor) -> Tensor:
    """Scale to the range of pixels, and round to integers."""
    return (raw * 30 + 128).round().clamp(1, 255)


def image_of(feature: Tensor) -> bytes:
    return " ".join(str(int(x)) for x in feature).encode()


def words_of(feature: Tensor) -> str:
    return image_of(feature).decode()


def transform(encoded: bytes) -> Tensor:
    pixels = torch.tensor([int(x) for x in encoded.split()], dtype=torch.uint8)
    return pixels.expand(3, 1, len(pixels))


def tokenize(texts: list[str]) -> Tensor:
    """Tokenize texts: a class prompt becomes a one-hot row; any other text lists its tokens as decimal numbers."""
    rows = []
    for text in texts:
        words = text.rstrip(".").split()
        if "name" in words:
            row = [0] * DIM
            row[int(words[-1])] = 255
        else:
            row = [int(word) for word in words if word.isdecimal()]
        rows.append(row)
    return torch.tensor(rows)


def features_of(x: Tensor) -> Tensor:
    """Return unit features for (n, DIM) pixels or tokens, after subtracting 128, the middle of their range."""
    return functional.normalize(x.float() - 128, dim=-1)


def class_features(classes: int) -> Tensor:
    return features_of(255 * torch.eye(DIM)[:classes])


class Model:
    """Model that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if image is not None:
            self.calls.append(("image", image.shape))
            return features_of(image[:, 0, 0]), None
        assert tokens is not None
        self.calls.append(("text", tokens.shape))
        return None, features_of(tokens)
