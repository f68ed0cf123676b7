"""Decode images: with PIL by default, or JPEGs with torchvision or simplejpeg, which are faster.

All three use libjpeg-turbo. PIL and simplejpeg can decode a large JPEG at 1/2, 1/4 or 1/8 of its size (scaled DCT, much
faster; pixels differ slightly from a full decode). What the other two refuse (PNG, CMYK, broken files) falls back to
PIL.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image, UnidentifiedImageError

from neuclip_ds.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ASPECT = 100  # resizing the short side of a longer strip would take gigabytes
_JPEG = b"\xff\xd8"


class DecodeError(Exception):
    """Raised for bytes that are no usable image; the message is the reason."""


class Decoded(NamedTuple):
    """An RGB image, possibly scaled down by its decoder, and its original size."""

    image: Image.Image | Tensor  # a tensor is uint8 (3, H, W)
    full_size: tuple[int, int]  # (width, height) of the file


Decode = Callable[[bytes, "int | None"], Decoded]


def decode_pil(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode an image to RGB with PIL.

    Args:
        min_side: a JPEG at least twice as large on both sides is decoded at a smaller scale, never below this.

    Raises:
        DecodeError: unknown format, truncated or broken data, or a side beyond 100 times the other.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        full_size = image.size
        if min_side is not None:
            image.draft("RGB", (min_side, min_side))
        image = image.convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # whose message contains a memory address
        raise DecodeError("unknown image format") from error
    except Exception as error:  # decoders raise many types: OSError, SyntaxError, zlib.error
        raise DecodeError(f"{type(error).__name__}: {error}") from error
    return Decoded(image, _checked(full_size))


def decode_torchvision(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode as `decode_pil`, but JPEGs with torchvision and always at full size."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    # libjpeg fills the missing part of a truncated file, which has no end-of-image marker, with grey without an error
    if not data.startswith(_JPEG) or data.rfind(b"\xff\xd9") <= 0:
        return decode_pil(data, min_side)
    try:
        image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError:
        return decode_pil(data, min_side)
    return Decoded(image, _checked((image.shape[2], image.shape[1])))


def decode_simplejpeg(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode as `decode_pil`, but JPEGs with simplejpeg."""
    import simplejpeg

    if not data.startswith(_JPEG):
        return decode_pil(data, min_side)
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        least = {} if min_side is None else {"min_height": min_side, "min_width": min_side}
        pixels = simplejpeg.decode_jpeg(data, "RGB", **least)
    except ValueError:
        return decode_pil(data, min_side)
    return Decoded(Image.fromarray(pixels), _checked((width, height)))


def find_decoder(name: str) -> Decode:
    """Return the decoder of that name (`data.decoder`); raise UserError if its library is not installed."""
    library, decode = DECODERS[name]
    if importlib.util.find_spec(library) is None:
        raise UserError(f"data.decoder={name} needs the package {library}: pip install {library}, or use pil.")
    return decode


DECODERS: dict[str, tuple[str, Decode]] = {
    "pil": ("PIL", decode_pil),
    "torchvision": ("torchvision", decode_torchvision),
    "simplejpeg": ("simplejpeg", decode_simplejpeg),
}


def _checked(full_size: tuple[int, int]) -> tuple[int, int]:
    if max(full_size) > _MAX_ASPECT * min(full_size):
        raise DecodeError(f"{full_size[0]} x {full_size[1]} pixels exceed an aspect ratio of {_MAX_ASPECT}")
    return full_size
