"""Decode and transform an encoded image to uint8 pixels (3, H, W); the model normalizes them on the device.

simplejpeg decodes JPEGs by default, to tensors, which torch resizes several times as fast as PIL resizes images; the
kernel is the same, and pixels differ by rounding. PIL decodes images that simplejpeg refuses (PNG, CMYK, broken files).
Both can decode a large JPEG at 1/2, 1/4 or 1/8 of its size (scaled DCT: much faster, with slightly different pixels).

Geometry as in open_clip, with antialiased bicubic interpolation: training takes a random resized crop, evaluation the
center of the resized image or, for models trained that way, the whole image squashed. Augmentation depends only on the
given `seed` (a hash of the data seed, epoch and index).
"""

import math
from dataclasses import dataclass

import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as F

from neuclip_ds.data.decoders import Decode, Decoded, decode_header, decode_pil, read_header

_JPEG = ("JPEG", "MPO")  # MPO: several JPEGs in a file, as cameras write them
_RATIO = (3 / 4, 4 / 3)


def decode_simplejpeg(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode as `decode_pil`, but JPEGs with simplejpeg."""
    header = read_header(data)
    if header.format not in _JPEG:
        return decode_header(header, min_side)
    width, height = header.size
    # as PIL's `draft`: libjpeg-turbo has no vector code for other scales, and between 1/2 and 1 they take longer than 1
    factor = 1 if min_side is None else next((n for n in (8, 4, 2) if min(width, height) // n >= min_side), 1)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
    except ValueError:
        return decode_header(header, min_side)
    return Decoded(torch.from_numpy(pixels).permute(2, 0, 1), header.size)


DECODERS: dict[str, Decode] = {"simplejpeg": decode_simplejpeg, "pil": decode_pil}  # by `data.decoder`


@dataclass(frozen=True)
class EvalTransform:
    """Resize the shorter side to `image_size` and crop the center square, or `squash` the whole image to the square.

    SigLIP and DFN were trained on squashed images.
    """

    image_size: int
    squash: bool = False
    decode: Decode = decode_pil

    def __call__(self, data: bytes, seed: int = 0) -> Tensor:
        image, square = self.decode(data, None).image, [self.image_size, self.image_size]
        if self.squash:
            return _resize(image, square)
        width, height = F.get_image_size(image)
        size = [int(self.image_size * side / min(width, height)) for side in (height, width)]
        return F.center_crop(_resize(image, size), square)


@dataclass(frozen=True)
class RandomCrop:
    """Crop a random fraction of the area in [crop_scale, 1] with a random aspect ratio, and resize it to the square."""

    image_size: int
    crop_scale: float
    decode: Decode = decode_pil

    def __call__(self, data: bytes, seed: int = 0) -> Tensor:
        # the smallest crop of a scaled-down decode still has as many pixels per side as the output
        min_side = math.ceil(self.image_size / math.sqrt(self.crop_scale * _RATIO[0]))
        image, (full_width, full_height) = self.decode(data, min_side)
        top, left, height, width = draw_crop(full_height, full_width, (self.crop_scale, 1.0), seed)
        width_now, height_now = F.get_image_size(image)
        down, across = height_now / full_height, width_now / full_width  # 1 unless decoded at a smaller scale
        top, left = round(top * down), round(left * across)
        height = min(round(height * down), height_now - top)  # rounding up both would go beyond the border
        width = min(round(width * across), width_now - left)
        return _resize(F.crop(image, top, left, height, width), [self.image_size, self.image_size])


ImageTransform = RandomCrop | EvalTransform
"""Turns encoded bytes into a uint8 (3, image_size, image_size) tensor; raises DecodeError for other bytes."""


def draw_crop(height: int, width: int, scale: tuple[float, float], seed: int) -> tuple[int, int, int, int]:
    """Draw torchvision's random crop (top, left, height, width): an area within `scale`, a ratio of 3:4 to 4:3."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        image = torch.empty(1, height, width, device="meta")
        top, left, high, wide = RandomResizedCrop.get_params(image, list(scale), list(_RATIO))
    return top, left, high, wide


def _resize(image: Image.Image | Tensor, size: list[int]) -> Tensor:
    """Resize an image to `size`, (H, W)."""
    if isinstance(image, Tensor):
        return interpolate(image.unsqueeze(0), size, mode="bicubic", antialias=True).squeeze(0)
    return F.pil_to_tensor(F.resize(image, size, InterpolationMode.BICUBIC))


def train_transform(
    image_size: int, crop_scale: float, decode: Decode = decode_pil, squash: bool = False
) -> ImageTransform:
    """Return a random resized crop; with `crop_scale` 1 the evaluation transform, without augmentation."""
    return RandomCrop(image_size, crop_scale, decode) if crop_scale < 1 else EvalTransform(image_size, squash, decode)
