"""Decoders agree with PIL on what an image is, and nearly on its pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from tars import jpeg

from neuclip_ds.data import decoders
from neuclip_ds.data.decoders import DECODERS, DecodeError, decode_pil, find_decoder
from neuclip_ds.errors import UserError


def encoded(mode: str, kind: str) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(jpeg(1, 50, 37))).convert(mode).save(out, kind)
    return out.getvalue()


def pixels(decoded: decoders.Decoded) -> np.ndarray:
    """(H, W, 3), int."""
    image = decoded.image
    array = image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    return array.astype(int)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("RGB", "WEBP")]
)
def test_every_mode_decodes_as_with_pil(name, mode, kind):
    data = encoded(mode, kind)
    ours, theirs = find_decoder(name)(data, None), decode_pil(data)
    assert ours.full_size == theirs.full_size == (50, 37)
    assert np.abs(pixels(ours) - pixels(theirs)).max() <= 2  # versions of libjpeg-turbo round chroma differently


@pytest.mark.parametrize("name", DECODERS)
def test_scaled_decoding_keeps_the_min_side(name):
    decoded = find_decoder(name)(jpeg(2, 900, 610), 100)
    height, width, _ = pixels(decoded).shape
    assert decoded.full_size == (900, 610)
    assert min(height, width) >= 100
    assert (width == 900) == (name == "torchvision")  # which has no scaled decoding


@pytest.mark.parametrize(
    ("width", "height", "min_side"), [(900, 610, 100), (401, 333, 60), (640, 479, 240), (9, 900, 2)]
)
def test_simplejpeg_scales_as_pil_does(width: int, height: int, min_side: int) -> None:
    data = jpeg(3, width, height)
    ours, theirs = (pixels(find_decoder(name)(data, min_side)) for name in ("simplejpeg", "pil"))
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 2


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0junk", jpeg(7)[:400], jpeg(7)[:-2], b"GIF89a", jpeg(8, 3000, 20)],
    ids=["empty", "marker", "junk", "cut", "end cut", "gif", "strip"],
)
def test_what_pil_refuses_all_refuse(name, data):
    try:
        decode_pil(data)
    except DecodeError as error:
        with pytest.raises(DecodeError, match=str(error).split(":")[0]):
            find_decoder(name)(data, None)
    else:
        assert find_decoder(name)(data, None).full_size == (40, 30)


def test_a_decoder_without_its_library_is_refused(monkeypatch):
    monkeypatch.setitem(DECODERS, "simplejpeg", ("simplejpeg_that_is_not_here", decoders.decode_simplejpeg))
    with pytest.raises(UserError, match=r"data.decoder=simplejpeg needs .* pip install"):
        find_decoder("simplejpeg")
