"""Decode the captions and the image of a sample; training draws one of the captions.

`data.captions` lists the caption sources: `txt` is the whole text member, `txt:lines` is every line of that member, and
`json:KEY` is the string or list of strings under a key of the JSON member, where recaptioned datasets keep captions.
Other members work in the same way, for example `syn.txt` and `blip.json:caption`.

Without weights, all captions of a sample are equally likely. With a weight for each source, training first draws one of
the sources that have a caption for the sample, in proportion to their weights, and then one of that source's captions.
With the sources `txt` and `syn.txt`, for example, a sample without a synthetic caption always gets its original
caption. The draw depends only on the sample's captions, the weights, and a hash of (seed, epoch, index).

To suit every tokenizer, invalid UTF-8 and lone surrogates (which JSON can encode) become U+FFFD, NUL becomes a space,
and captions are truncated to 10,000 characters.

This module decodes images with PIL; `neuclip_ds.data.images` contains a faster decoder. Either way, PIL reads the
header. Only formats that occur in web crawls are tried (an EPS file would start Ghostscript), and images with too many
pixels or an extreme aspect ratio are rejected. The result is 8-bit RGB: only the high byte of 16-bit channels is kept,
alpha is dropped as in open_clip and timm, and an animation is reduced to its first frame.

This module does not import torch, because that takes seconds in each process that scans or packs shards.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from neuclip_ds.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

CaptionSources = Sequence[str] | Mapping[str, float]
"""The names of caption sources as in `data.captions`, or a mapping from these names to weights."""

TEXT = "txt"
JSON = "json"
_LINES = "lines"
_NAME = re.compile(r"((?:[^.:/]+\.)*)(txt|json)(?::(.+))?")  # the extension of a member, and the key
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_CHARACTERS = 10_000  # far more than captions need; a tokenizer takes seconds for megabytes


class _Source(NamedTuple):
    extension: str
    is_json: bool
    key: str  # key in a JSON member; for a text member, `lines` or empty


class DrawnCaption(NamedTuple):
    """One of a sample's captions, and its number in the list of all captions of the sample."""

    text: str
    number: int


class Captions:
    """Caption sources as in `data.captions`, with or without weights; `extensions` lists the file extensions to read.

    Raises UserError if there is no source or a source has an unknown form.
    """

    def __init__(self, names: CaptionSources = (TEXT,)) -> None:
        self._sources = [_parse(name) for name in names]
        self._weights = list(names.values()) if isinstance(names, Mapping) else None
        if not self._sources:
            raise UserError("data.captions names no source of captions; list at least one, such as txt.")
        self.extensions = tuple(dict.fromkeys(source.extension for source in self._sources))

    @property
    def may_be_several(self) -> bool:
        """Whether a sample may have several captions; it has at most one if the only source is a whole text member."""
        first = self._sources[0]
        return len(self._sources) > 1 or first.is_json or first.key == _LINES

    def all_captions(self, members: Mapping[str, bytes]) -> list[str]:
        """Return a sample's captions in the order of the sources, omitting blank captions; invalid JSON gives none."""
        return list(itertools.chain.from_iterable(self._captions_by_source(members)))

    def draw(self, members: Mapping[str, bytes], number: int) -> DrawnCaption | None:
        """Use a random 64-bit number to choose one of a sample's captions; return None if there are no captions."""
        by_source = self._captions_by_source(members)
        earlier = 0  # captions of the sources before the drawn one
        if self._weights is None:
            captions = list(itertools.chain.from_iterable(by_source))
        else:
            weights = [weight if texts else 0 for weight, texts in zip(self._weights, by_source, strict=True)]
            source = _draw_index(weights, number)
            earlier = sum(map(len, by_source[:source]))
            captions = by_source[source]
        if not captions:
            return None
        drawn = number % len(captions)
        return DrawnCaption(captions[drawn], earlier + drawn)

    def _captions_by_source(self, members: Mapping[str, bytes]) -> list[list[str]]:
        """Return a list of captions for each source, without blank captions."""
        by_source = []
        for source in self._sources:
            captions = []
            if source.extension in members:
                for text in _read_texts(source, members[source.extension]):
                    caption = text.replace("\0", " ").strip()[:_MAX_CHARACTERS]
                    if caption:
                        captions.append(_SURROGATE.sub("\ufffd", caption))
            by_source.append(captions)
        return by_source


def json_object(data: bytes) -> dict[str, Any]:
    """Return the object in a JSON member, or an empty dictionary if the member does not contain a valid object."""
    try:
        tree = json.loads(data.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):  # ValueError also for numbers of more than 4,300 digits
        return {}
    return tree if isinstance(tree, dict) else {}


def _parse(name: str) -> _Source:
    match = _NAME.fullmatch(name)
    prefix, kind, key = match.groups("") if match else ("", "", "")
    if (kind == TEXT and key in ("", _LINES)) or (kind == JSON and key):
        return _Source(prefix.lower() + kind, kind == JSON, key)
    raise UserError(
        f"{name!r} is not a source of captions (data.captions or --captions): use txt, txt:lines, json:KEY, or one of "
        "these after a prefix, such as syn.txt."
    )


def _draw_index(weights: Sequence[float], number: int) -> int:
    """Use a random 64-bit number to choose an index, with probabilities proportional to the weights.

    The draw uses the high bits of the number, because `Captions.draw` chooses a caption by `number % len(captions)`.
    """
    cumulative_weights = list(itertools.accumulate(weights))
    uniform = (number >> 11) / 2**53  # in [0, 1)
    return bisect_right(cumulative_weights, uniform * cumulative_weights[-1], hi=len(weights) - 1)


def _read_texts(source: _Source, data: bytes) -> list[str]:
    """Return the texts of a source, given the bytes of its member."""
    if not source.is_json:
        text = data.decode("utf-8-sig", "replace")
        return text.splitlines() if source.key == _LINES else [text]
    value = json_object(data).get(source.key)
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_MAX_PIXELS = 89_478_485  # PIL's limit, above which it warns; 268 MB of RGB
_MAX_ASPECT = 100  # resizing a longer strip by its short side would take gigabytes


class DecodeError(Exception):
    """Raised for bytes that cannot be used as an image; the message gives the reason."""


class Decoded(NamedTuple):
    """An RGB image, which the decoder may have scaled down, and its original size."""

    image: Image.Image | Tensor  # a tensor is uint8 (3, H, W), in any memory layout
    full_size: tuple[int, int]  # (width, height) of the file


Decode = Callable[[bytes, "int | None"], Decoded]


def decode_pil(data: bytes, min_side: int | None = None) -> Decoded:
    """Decode an image to RGB with PIL.

    If `min_side` is given, a JPEG whose short side is at least 2 x `min_side` pixels is scaled down by 2, 4 or 8; the
    short side then still has at least `min_side` pixels. By default, no image is scaled.

    Raises:
        DecodeError: the format is not JPEG, PNG, WebP, GIF or BMP, the data is truncated or damaged, there are more
            than 89 million pixels, or one side is more than 100 times as long as the other side.
    """
    return decode_header(read_header(data), min_side)


def read_header(data: bytes) -> Image.Image:
    """Open an image without decoding its pixels; raise DecodeError if its header, format or size is invalid."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # its message contains a memory address
        raise DecodeError("unknown image format") from error
    except Exception as error:  # decoders raise many types: OSError, SyntaxError, zlib.error
        raise DecodeError(f"{type(error).__name__}: {error}") from error
    width, height = image.size
    if width * height > _MAX_PIXELS:
        raise DecodeError(f"an image of {width} x {height} pixels exceeds the limit of {_MAX_PIXELS} pixels")
    if not 0 < max(width, height) <= _MAX_ASPECT * min(width, height):
        raise DecodeError(f"an image of {width} x {height} pixels is empty or has an aspect ratio above {_MAX_ASPECT}")
    return image


def decode_header(image: Image.Image, min_side: int | None) -> Decoded:
    """Decode an image that `read_header` has opened, as `decode_pil` does; raise DecodeError if that fails."""
    full_size = image.size
    try:
        if min_side is not None:
            image.draft("RGB", (min_side, min_side))
        if image.mode.startswith("I"):  # 16 bits of gray, which PIL would clip at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return Decoded(image.convert("RGB"), full_size)
    except MemoryError:
        raise
    except Exception as error:  # many types, as above
        raise DecodeError(f"{type(error).__name__}: {error}") from error
