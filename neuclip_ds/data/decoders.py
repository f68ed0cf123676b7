"""Decode images: JPEGs with simplejpeg by default, or with PIL or torchvision.

PIL reads the header first, whoever decodes, so all agree on what is no image: only the formats that crawls of the web
hold are tried (an EPS would start Ghostscript), and no more pixels than memory has room for. All use libjpeg-turbo. PIL
and simplejpeg can decode a large JPEG at 1/2, 1/4 or 1/8 of its size (scaled DCT, much faster; pixels differ slightly
from a full decode). What the other two refuse (PNG, CMYK, broken files) falls back to PIL.

simplejpeg and torchvision give tensors, which `neuclip_ds.data.transforms` resizes several times as fast as PIL its
images.

The result is 8-bit RGB: of 16 bits a channel the high byte, alpha dropped as in open_clip and timm, of an animation the
first frame.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from neuclip_ds.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_MAX_PIXELS = 89_478_485  # PIL's own limit, above which it warns; 268 MB of RGB
_MAX_ASPECT = 100  # resizing the short side of a longer strip would take gigabytes
_JPEG = ("JPEG", "MPO")  # MPO: several JPEGs in a file, as cameras write them


class DecodeError(Exception):
    """Raised for bytes that are no usable image; the message is the reason."""


class Decoded(NamedTuple):
    """An RGB image, possibly scaled down by its decoder, and its original size."""

    image: Image.Image | Tensor  # a tensor is uint8 (3, H, W), in any order of memory
    full_size: tuple[int, int]  # (width, height) of the file


Decode = Callable[[bytes, "int | None"], Decoded]


def decode_pil(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode an image to RGB with PIL.

    Args:
        min_side: a JPEG at least twice as large on both sides is decoded at a smaller scale, never below this.

    Raises:
        DecodeError: another format than JPEG, PNG, WebP, GIF and BMP, truncated or broken data, more than 89 million
            pixels, or a side beyond 100 times the other.
    """
    return _decode(_read_header(data), min_side)


def decode_torchvision(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode as `decode_pil`, but JPEGs with torchvision and always at full size."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    header = _read_header(data)
    # libjpeg fills the missing part of a truncated file, which has no end-of-image marker, with grey without an error
    if header.format not in _JPEG or data.rfind(b"\xff\xd9") <= 0:
        return _decode(header, min_side)
    try:
        image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError:
        return _decode(header, min_side)
    return Decoded(image, header.size)


def decode_simplejpeg(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode as `decode_pil`, but JPEGs with simplejpeg."""
    import simplejpeg
    import torch

    header = _read_header(data)
    if header.format not in _JPEG:
        return _decode(header, min_side)
    width, height = header.size
    # as PIL's `draft`: libjpeg-turbo has no vector code for other scales, and between 1/2 and 1 they take longer than 1
    factor = 1 if min_side is None else next((n for n in (8, 4, 2) if min(width, height) // n >= min_side), 1)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
    except ValueError:
        return _decode(header, min_side)
    return Decoded(torch.from_numpy(pixels).permute(2, 0, 1), header.size)


def find_decoder(name: str | None) -> Decode:
    """Return the decoder of that name (`data.decoder`), by default that of new runs.

    Raises:
        UserError: its library is not installed.
    """
    name = name or DEFAULT
    library, decode = DECODERS[name]
    if importlib.util.find_spec(library) is None:
        raise UserError(f"data.decoder={name} needs the package {library}: pip install {library}, or use pil.")
    return decode


DECODERS: dict[str, tuple[str, Decode]] = {
    "simplejpeg": ("simplejpeg", decode_simplejpeg),
    "pil": ("PIL", decode_pil),
    "torchvision": ("torchvision", decode_torchvision),
}
DEFAULT = "simplejpeg"


def _read_header(data: bytes) -> Image.Image:
    """Return an image whose pixels are not decoded yet; raise DecodeError where they must not be."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # whose message contains a memory address
        raise DecodeError("unknown image format") from error
    except Exception as error:  # decoders raise many types: OSError, SyntaxError, zlib.error
        raise DecodeError(f"{type(error).__name__}: {error}") from error
    width, height = image.size
    if width * height > _MAX_PIXELS:
        raise DecodeError(f"{width} x {height} pixels exceed {_MAX_PIXELS}")
    if not 0 < max(width, height) <= _MAX_ASPECT * min(width, height):
        raise DecodeError(f"{width} x {height} pixels are empty or exceed an aspect ratio of {_MAX_ASPECT}")
    return image


def _decode(image: Image.Image, min_side: int | None) -> Decoded:
    full_size = image.size
    try:
        if min_side is not None:
            image.draft("RGB", (min_side, min_side))
        if image.mode.startswith("I"):  # 16 bits of grey, which PIL would clip at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return Decoded(image.convert("RGB"), full_size)
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise DecodeError(f"{type(error).__name__}: {error}") from error
