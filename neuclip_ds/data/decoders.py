"""Encoded images to pixels: PIL by default; torchvision and simplejpeg for JPEGs, the faster libraries where installed.

All three sit on libjpeg-turbo. PIL and simplejpeg can decode a large JPEG at 1/2, 1/4 or 1/8 of its size (scaled DCT,
much faster; pixels differ slightly from a full decode). What the other two refuse (PNG, CMYK, broken files) goes to
PIL, which has the last word on what is broken.
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

_MAX_ASPECT = 100  # a longer strip would grow to gigabytes when its short side is resized
_JPEG = b"\xff\xd8"


class DecodeError(Exception):
    """The bytes are no usable image; the message says why."""


class Decoded(NamedTuple):
    """An RGB image, perhaps scaled down by its decoder, and the (width, height) of the file.

    `image` is a PIL image, or a uint8 tensor (3, H, W).
    """

    image: Image.Image | Tensor
    full_size: tuple[int, int]


Decode = Callable[[bytes, "int | None"], Decoded]


def decode_pil(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode to RGB with PIL.

    Args:
        min_side: where a JPEG is at least twice as large on both sides, it is decoded at a smaller scale, never
            below this.

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
    except UnidentifiedImageError as error:  # its message holds an address in memory
        raise DecodeError("unknown image format") from error
    except Exception as error:  # decoders of foreign bytes raise whatever they like: OSError, SyntaxError, zlib.error
        raise DecodeError(f"{type(error).__name__}: {error}") from error
    return Decoded(image, _checked(full_size))


def decode_torchvision(data: bytes, min_side: int | None = None) -> Decoded:
    """As `decode_pil`, with torchvision for JPEGs, always at full size."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    # libjpeg fills what is missing of a truncated file with grey and says nothing to torchvision
    if not data.startswith(_JPEG) or not _is_complete(data):
        return decode_pil(data, min_side)
    try:
        image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError:
        return decode_pil(data, min_side)
    return Decoded(image, _checked((image.shape[2], image.shape[1])))


def decode_simplejpeg(data: bytes, min_side: int | None = None) -> Decoded:
    """As `decode_pil`, with simplejpeg for JPEGs."""
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
    """The decoder of that name (`data.decoder`). UserError where its library is not installed."""
    library, decode = DECODERS[name]
    if importlib.util.find_spec(library) is None:
        raise UserError(f"data.decoder={name} needs the package {library}: pip install {library}, or use pil.")
    return decode


DECODERS: dict[str, tuple[str, Decode]] = {
    "pil": ("PIL", decode_pil),
    "torchvision": ("torchvision", decode_torchvision),
    "simplejpeg": ("simplejpeg", decode_simplejpeg),
}


def _is_complete(data: bytes) -> bool:
    """Whether the end-of-image marker is there, rubbish behind it aside."""
    return data.rfind(b"\xff\xd9") > 0


def _checked(full_size: tuple[int, int]) -> tuple[int, int]:
    if max(full_size) > _MAX_ASPECT * min(full_size):
        raise DecodeError(f"{full_size[0]} x {full_size[1]} pixels are too long a strip")
    return full_size
