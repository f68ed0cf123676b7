"""Images of odd formats: converted by rule or bad samples, by all decoders alike, and never run by a program."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tars import jpeg

from neuclip_ds.data.decoders import DecodeError, decode_pil
from neuclip_ds.data.images import DECODERS

RAMP = np.linspace(0, 65535, 40 * 30).reshape(30, 40)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(width: int, height: int, bits: int, color: int, rows: bytes) -> bytes:
    """A PNG as its specification has it: also with 16 bits a channel, and with sizes that its data do not have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_16(channels: int, color: int) -> bytes:
    values = np.repeat(RAMP[:, :, None], channels, axis=2).astype(">u2")
    return png(40, 30, 16, color, b"".join(b"\0" + row.tobytes() for row in values))


def pixels(name: str, data: bytes) -> np.ndarray:
    """(H, W, 3)."""
    image = DECODERS[name](data, None).image
    return image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) else np.asarray(image)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("channels", "color"), [(1, 0), (3, 2), (2, 4), (4, 6)], ids=["gray", "RGB", "LA", "RGBA"])
def test_16_bits_a_channel_become_their_high_byte(name: str, channels: int, color: int) -> None:
    found = pixels(name, png_16(channels, color))
    expected = RAMP.astype(np.uint16) >> 8
    assert (found[:, :, 0] == expected).all()  # PIL alone clips: 254 of 256 become white


BAD = {
    "float TIFF": saved(Image.fromarray((RAMP / 65535).astype(np.float32)), "TIFF"),
    "TIFF": saved(Image.new("RGB", (40, 30)), "TIFF"),
    "EPS": saved(Image.new("RGB", (40, 30)), "EPS"),
    "PPM": saved(Image.new("RGB", (40, 30)), "PPM"),
    "ICO": saved(Image.new("RGB", (40, 40)), "ICO"),
    "PDF": saved(Image.new("RGB", (40, 30)), "PDF"),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' width='40' height='30'/>",
    "bomb": png(60_000, 60_000, 8, 2, bytes(1000)),
    "wide bomb": png(2**31 - 1, 2**31 - 1, 8, 2, b""),
    "no pixels": png(0, 0, 8, 2, b""),
    "empty": b"",
    "junk": b"\xff\xd8\xff\xe0junk",
    "strip": jpeg(8, 3000, 20),
    "cut JPEG": jpeg(7)[:400],
    "cut PNG": saved(Image.open(io.BytesIO(jpeg(1))), "PNG")[:-300],
    "cut after a thumbnail": saved(Image.open(io.BytesIO(jpeg(1, 300, 200))), "JPEG", exif=b"Exif\0\0" + jpeg(2))[:-99],
    "cut animation": saved(Image.new("P", (40, 30)), "GIF", save_all=True, append_images=[Image.new("P", (40, 30), 1)])[
        :40
    ],
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_image_is_bad_for_every_decoder(name: str, kind: str) -> None:
    with pytest.raises(DecodeError):
        DECODERS[name](BAD[kind], None)


@pytest.mark.parametrize("name", DECODERS)
def test_the_first_frame_of_an_animation_counts(name: str) -> None:
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    for kind in ("GIF", "PNG", "WEBP", "MPO"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        red, _, blue = pixels(name, data)[15, 20].tolist()
        assert red > 200 and blue < 50


def test_an_eps_never_starts_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DecodeError, match="unknown image format"):
        decode_pil(BAD["EPS"])
    assert not (tmp_path / "started").exists()
