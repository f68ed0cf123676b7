"""Small towers that are trained from scratch, and their inputs: the pixels and the words of image-caption pairs."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from neuclip_ds.files import atomic_write
from study.features import Pairs, read_samples, shards_of

SIDE = 32  # of an image, in pixels
RAREST = 10  # smallest number of occurrences of a word, or of two words in a row, that the text tower reads
UNITS = 256  # of the text tower's hidden layer


def image_tower(width: int) -> nn.Module:
    """Return three convolutions of stride 2 and a linear layer: (b, 3 * SIDE * SIDE) pixels to (b, width)."""
    return nn.Sequential(
        nn.Unflatten(1, (3, SIDE, SIDE)),
        nn.Conv2d(3, 16, kernel_size=3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64 * (SIDE // 8) ** 2, width),
    )


def text_tower(words: int, width: int) -> nn.Module:
    """Return a perceptron with one hidden layer: (b, words) indicators of words and word pairs to (b, width)."""
    return nn.Sequential(nn.Linear(words, UNITS), nn.GELU(), nn.Linear(UNITS, width))


def cache_pixels(source: str, folder: Path) -> None:
    """Write FOLDER/{train,test}.safetensors, unless they exist, with the inputs of the towers instead of features.

    Args:
        source: a folder with shards in train/ and val/, or demo:N for N rendered scenes.

    Raises:
        UserError: there are no shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}.safetensors" for split in ("train", "test")}
    if all(path.is_file() for path in paths.values()):
        return
    shards = shards_of(source, folder)
    train_pixels, train_terms = _read(read_samples(shards / "train"))
    counts = Counter(term for terms in train_terms for term in terms)
    vocabulary = sorted(term for term, count in counts.items() if count >= RAREST)
    _save(paths["train"], train_pixels, train_terms, vocabulary)
    test_pixels, test_terms = _read(read_samples(shards / "val"))
    _save(paths["test"], test_pixels, test_terms, vocabulary)


def _read(samples: Iterable[tuple[Image.Image, list[str]]]) -> tuple[Tensor, list[set[str]]]:
    """Return (images, 3 * SIDE * SIDE) pixels and the terms of each image's first caption."""
    pixels: list[Tensor] = []
    terms: list[set[str]] = []
    for image, captions in samples:
        pixels.append(pil_to_tensor(image.resize((SIDE, SIDE))).flatten().half())
        terms.append(_terms(captions[0]))
    return torch.stack(pixels), terms


def _terms(caption: str) -> set[str]:
    """Return the words of a caption, and all pairs of consecutive words."""
    words = re.findall("[a-z0-9]+", caption.lower())
    in_a_row = {f"{first} {second}" for first, second in itertools.pairwise(words)}
    return {*words, *in_a_row}


def _save(path: Path, pixels: Tensor, terms: list[set[str]], vocabulary: list[str]) -> None:
    column = {term: number for number, term in enumerate(vocabulary)}
    text = torch.zeros(len(terms), len(vocabulary), dtype=torch.float16)
    for row, present in enumerate(terms):
        text[row, [column[term] for term in present if term in column]] = 1
    pairs = Pairs(pixels[None], text, torch.arange(len(terms)))
    with atomic_write(path) as temporary:
        save_file(pairs._asdict(), temporary)
