"""Decode an encoded image and transform it to uint8 pixels (3, H, W), which the model normalizes on the device.

With `data.decoder=simplejpeg`, the default of a run, simplejpeg decodes JPEGs to tensors, which PyTorch resizes several
times as fast as PIL does, with the same kernel; pixels differ only by rounding. PIL then decodes other formats and the
JPEGs that simplejpeg rejects. For random crops, both decoders scale large JPEGs down to 1/2, 1/4 or 1/8 in the DCT
domain; this is much faster, but changes pixels slightly.

The geometry matches open_clip's, with antialiased interpolation. Training takes a random resized crop with bicubic
interpolation, or the same image as evaluation if `data.crop_scale` is 1. Evaluation takes the center of the resized
image, or squashes the whole image to a square for models that were trained that way, with the model's interpolation.
The augmentation depends only on `seed`, a hash of (`run.seed`, epoch, index).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as F

from neuclip_ds.data.decoders import Decode, Decoded, decode_header, decode_pil, read_header

if TYPE_CHECKING:  # the models' module imports transformers
    from neuclip_ds.models.pretrained.base import Interpolation, Preprocessing

_JPEG = ("JPEG", "MPO")  # MPO: several JPEGs in one file, written by some cameras
_RATIO = (3 / 4, 4 / 3)


def decode_simplejpeg(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode an image as `decode_pil` does, but decode JPEGs with simplejpeg."""
    header = read_header(data)
    if header.format not in _JPEG:
        return decode_header(header, min_side)
    width, height = header.size
    factor = 1
    if min_side is not None:
        # the scales of PIL's `draft`; libjpeg-turbo has no SIMD code for other scales, which can be slower than 1/1
        factor = next((scale for scale in (8, 4, 2) if min(width, height) // scale >= min_side), 1)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
    except ValueError:
        return decode_header(header, min_side)
    return Decoded(torch.from_numpy(pixels).permute(2, 0, 1), header.size)


DECODERS: dict[str, Decode] = {"simplejpeg": decode_simplejpeg, "pil": decode_pil}  # keys are values of `data.decoder`


@dataclass(frozen=True)
class EvalTransform:
    """Resize the shorter side and crop the center or, with `squash`, resize the whole image to a square.

    The shorter side becomes `image_size + margin` pixels. SigLIP and DFN models were trained on squashed images.
    """

    image_size: int
    squash: bool = False
    decode: Decode = decode_pil
    margin: int = 0
    interpolation: Interpolation = "bicubic"

    @classmethod
    def of(cls, preprocessing: Preprocessing, decode: Decode = decode_pil) -> EvalTransform:
        """Return the transform that a model's `preprocessing` describes."""
        return cls(preprocessing.size, preprocessing.squash, decode, preprocessing.margin, preprocessing.interpolation)

    def __call__(self, data: bytes, seed: int = 0) -> Tensor:
        return self.resize(self.decode(data, None).image)

    def resize(self, image: Image.Image | Tensor) -> Tensor:
        """Resize and, unless `squash`, crop an RGB image or uint8 (3, H, W) tensor to (3, image_size, image_size)."""
        square = [self.image_size, self.image_size]
        if self.squash:
            return _resize(image, square, self.interpolation)
        width, height = F.get_image_size(image)
        shorter_side = self.image_size + self.margin
        size = [int(shorter_side * side / min(width, height)) for side in (height, width)]
        return F.center_crop(_resize(image, size, self.interpolation), square)


@dataclass(frozen=True)
class RandomCrop:
    """Crop a random region (relative area in [crop_scale, 1], aspect ratio 3:4 to 4:3) and resize it to a square."""

    image_size: int
    crop_scale: float
    decode: Decode = decode_pil

    def __call__(self, data: bytes, seed: int = 0) -> Tensor:
        return self.views(data, [seed])[0]

    def views(self, data: bytes, seeds: Sequence[int]) -> list[Tensor]:
        """Decode an image once, and return one crop for each seed."""
        # even the smallest crop of a scaled-down image has at least as many pixels per side as the output
        min_side = math.ceil(self.image_size / math.sqrt(self.crop_scale * _RATIO[0]))
        decoded = self.decode(data, min_side)
        return [self._crop(decoded, seed) for seed in seeds]

    def _crop(self, decoded: Decoded, seed: int) -> Tensor:
        image, (full_width, full_height) = decoded
        top, left, height, width = draw_crop(full_height, full_width, (self.crop_scale, 1.0), seed)
        # convert the crop to the pixels of the decoded image, which the decoder may have scaled down
        decoded_width, decoded_height = F.get_image_size(image)
        vertical_scale = decoded_height / full_height
        horizontal_scale = decoded_width / full_width
        top = round(top * vertical_scale)
        left = round(left * horizontal_scale)
        height = min(round(height * vertical_scale), decoded_height - top)  # rounding both up could exceed the border
        width = min(round(width * horizontal_scale), decoded_width - left)
        return _resize(F.crop(image, top, left, height, width), [self.image_size, self.image_size])


class ImageTransform(Protocol):
    """Transforms an encoded image to a uint8 (3, image_size, image_size) tensor; raises DecodeError if that fails."""

    @property
    def image_size(self) -> int:
        """Side length of the result in pixels."""

    def __call__(self, data: bytes, seed: int = 0) -> Tensor:
        """Transform an image; random changes depend only on the seed."""


def draw_crop(height: int, width: int, scale: tuple[float, float], seed: int) -> tuple[int, int, int, int]:
    """Draw a crop (top, left, height, width) as torchvision does: relative area in `scale`, aspect ratio 3:4 to 4:3."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        image = torch.empty(1, height, width, device="meta")
        return RandomResizedCrop.get_params(image, list(scale), list(_RATIO))


def _resize(image: Image.Image | Tensor, size: list[int], interpolation: Interpolation = "bicubic") -> Tensor:
    """Resize an image to `size` (H, W) and return it as a tensor."""
    if isinstance(image, Tensor):
        return interpolate(image.unsqueeze(0), size, mode=interpolation, antialias=True).squeeze(0)
    return F.pil_to_tensor(F.resize(image, size, InterpolationMode(interpolation)))


def train_transform(
    image_size: int, crop_scale: float, decode: Decode = decode_pil, whole: EvalTransform | None = None
) -> ImageTransform:
    """Return a `RandomCrop` or, if `crop_scale` is 1, an `EvalTransform`, which does not augment images.

    Args:
        image_size: side of the square output in pixels.
        crop_scale: smallest relative area of a crop.
        decode: the decoder.
        whole: the transform if `crop_scale` is 1; by default, an `EvalTransform` to `image_size` pixels with `decode`
            and otherwise default options.
    """
    if crop_scale < 1:
        return RandomCrop(image_size, crop_scale, decode)
    return whole or EvalTransform(image_size, decode=decode)
