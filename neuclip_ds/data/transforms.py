"""From an encoded image to uint8 pixels (3, H, W); normalisation happens on the device, in the model.

Geometry as in open_clip: training takes a random resized crop, evaluation the centre of the resized image or, for
models trained so, all of it out of proportion; bicubic. Augmentation depends on the `randomness` handed in (a hash of
seed, epoch and index) and on nothing else.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as F

_RATIO = (3 / 4, 4 / 3)
_MAX_ASPECT = 100  # a longer strip would grow to gigabytes when its short side is resized


class DecodeError(Exception):
    """The bytes are no usable image; the message says why."""


class ImageTransform(Protocol):
    """Encoded bytes to a uint8 (3, image_size, image_size) tensor; DecodeError where they are no usable image."""

    image_size: int

    def __call__(self, data: bytes, randomness: int = 0) -> Tensor: ...


class Decoded(NamedTuple):
    """An RGB image, perhaps scaled down by its decoder, and the (width, height) of the file."""

    image: Image.Image
    full_size: tuple[int, int]


def decode(data: bytes, least_side: int | None = None) -> Decoded:
    """Decode to RGB.

    Args:
        least_side: where a JPEG is at least twice as large on both sides, it is decoded at 1/2, 1/4 or 1/8 of its
            size (libjpeg's scaled DCT, much faster; pixels differ slightly from a full decode), never below this.

    Raises:
        DecodeError: unknown format, truncated or broken data, or a side beyond 100 times the other.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        full_size = image.size
        if least_side is not None:
            image.draft("RGB", (least_side, least_side))
        image = image.convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # its message holds an address in memory
        raise DecodeError("unknown image format") from error
    except Exception as error:  # decoders of foreign bytes raise whatever they like: OSError, SyntaxError, zlib.error
        raise DecodeError(f"{type(error).__name__}: {error}") from error
    if max(full_size) > _MAX_ASPECT * min(full_size):
        raise DecodeError(f"{full_size[0]} x {full_size[1]} pixels are too long a strip")
    return Decoded(image, full_size)


class CentreCrop:
    """Shorter side resized to `image_size`, then the centre square."""

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def __call__(self, data: bytes, randomness: int = 0) -> Tensor:
        image = F.resize(decode(data).image, [self.image_size], InterpolationMode.BICUBIC)
        return F.pil_to_tensor(F.center_crop(image, [self.image_size, self.image_size]))


class Squash:
    """The whole image, squeezed into the square: SigLIP and DFN were trained so."""

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def __call__(self, data: bytes, randomness: int = 0) -> Tensor:
        side = [self.image_size, self.image_size]
        return F.pil_to_tensor(F.resize(decode(data).image, side, InterpolationMode.BICUBIC))


class RandomCrop:
    """A crop of random area share in [crop_scale, 1] and random aspect ratio, resized to the square."""

    def __init__(self, image_size: int, crop_scale: float) -> None:
        self.image_size = image_size
        self._scale = (crop_scale, 1.0)
        # The smallest crop of the scaled-down decode still has as many pixels a side as the output.
        self._least_side = math.ceil(image_size / math.sqrt(crop_scale * _RATIO[0]))

    def __call__(self, data: bytes, randomness: int = 0) -> Tensor:
        image, (full_width, full_height) = decode(data, self._least_side)
        with _seeded(randomness):
            top, left, height, width = _draw_crop(full_height, full_width, self._scale)
        down, across = image.height / full_height, image.width / full_width  # 1 unless decoded at a smaller scale
        box = round(top * down), round(left * across), round(height * down), round(width * across)
        side = [self.image_size, self.image_size]
        return F.pil_to_tensor(F.resized_crop(image, *box, side, InterpolationMode.BICUBIC))


def _draw_crop(height: int, width: int, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """(top, left, height, width) of torchvision's random crop, from torch's generator."""
    shape_only = torch.empty(1, 1, 1).expand(1, height, width)  # it looks at nothing else
    return RandomResizedCrop.get_params(shape_only, list(scale), list(_RATIO))


def train_transform(image_size: int, crop_scale: float, squash: bool = False) -> ImageTransform:
    """Random resized crop; with `crop_scale` 1 the evaluation transform, without augmentation."""
    return eval_transform(image_size, squash) if crop_scale == 1 else RandomCrop(image_size, crop_scale)


def eval_transform(image_size: int, squash: bool = False) -> ImageTransform:
    """Resize and centre crop, or the whole image squeezed into the square."""
    return Squash(image_size) if squash else CentreCrop(image_size)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's CPU generator seeded within the block, and put back after it; CUDA's are not touched."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
