"""Check that decoders agree with PIL, and that transforms agree with torchvision and are deterministic per seed."""

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
from torchvision import transforms as reference
from torchvision.transforms.functional import InterpolationMode

from neuclip_ds.data.decoders import Decode, Decoded, DecodeError, decode_pil
from neuclip_ds.data.images import DECODERS, EvalTransform, decode_simplejpeg, draw_crop, train_transform

MODES = [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("RGB", "WEBP")]
SCALED = {(900, 610): 100, (401, 333): 60, (640, 479): 240, (9, 900): 2}  # image size -> min_side


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def encoded(mode: str, kind: str) -> bytes:
    return saved(Image.open(io.BytesIO(jpeg(1, 50, 37))).convert(mode), kind)


TRANSFORMS = {
    "train": train_transform(32, 0.5),
    "plain": train_transform(32, 1.0),
    "eval": EvalTransform(32),
    "simplejpeg": train_transform(32, 0.5, decode_simplejpeg),
    "squash": EvalTransform(32, squash=True),
}


def pixels_of(decoded: Decoded) -> np.ndarray:
    """Return the pixels as an integer array of shape (H, W, 3)."""
    image = decoded.image
    array = image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    return array.astype(int)


@pytest.mark.parametrize(
    ("data", "size", "min_side"),
    [
        *((encoded(mode, kind), (50, 37), 0) for mode, kind in MODES),
        *((jpeg(3, *size), size, side) for size, side in SCALED.items()),
    ],
    ids=[*map(str, MODES), *map(str, SCALED)],
)
def test_simplejpeg_decodes_and_scales_as_pil_does(data: bytes, size: tuple[int, int], min_side: int) -> None:
    ours, theirs = (decode(data, min_side or None) for decode in (decode_simplejpeg, decode_pil))
    assert ours.full_size == theirs.full_size == size
    assert pixels_of(ours).shape == pixels_of(theirs).shape and min_side <= min(pixels_of(ours).shape[:2])
    assert np.abs(pixels_of(ours) - pixels_of(theirs)).max() <= 2  # versions of libjpeg-turbo round chroma differently


@pytest.mark.parametrize("size", [(1, 1), (1, 60), (60, 1), (31, 33), (640, 480)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_images_of_odd_sizes_become_squares(name, size):
    pixels = TRANSFORMS[name](jpeg(2, *size), 3)
    assert (pixels.shape, pixels.dtype) == ((3, 32, 32), torch.uint8)


def test_augmentation_is_a_function_of_its_seed_alone():
    transform, data = TRANSFORMS["train"], jpeg(3)
    first = transform(data, 11)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(transform(data, 11), first)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random stream is untouched"
    assert len({transform(data, r).numpy().tobytes() for r in (1, 2**63, 2**64 - 1, 7)}) == 4


def test_equal_to_torchvisions_pipelines():
    data = jpeg(5)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    bicubic = InterpolationMode.BICUBIC
    center = reference.Compose([reference.Resize(32, bicubic), reference.CenterCrop(32), reference.PILToTensor()])
    assert torch.equal(TRANSFORMS["eval"](data), center(image))
    assert torch.equal(TRANSFORMS["plain"](data, 1), center(image))
    random = reference.Compose(
        [reference.RandomResizedCrop(32, (0.5, 1.0), interpolation=bicubic), reference.PILToTensor()]
    )
    torch.manual_seed(17)
    assert torch.equal(TRANSFORMS["train"](data, 17), random(image))


@pytest.mark.parametrize("size", [(384, 512), (375, 500), (224, 224), (300, 40), (40, 900), (1, 1)])
@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.08, 1.0)])
def test_crops_are_those_of_torchvision(size: tuple[int, int], scale: tuple[float, float]) -> None:
    image = torch.empty(1, 1, 1).expand(1, *size)
    for seed in [*range(100), 2**63, 2**64 - 1]:
        torch.manual_seed(seed)
        expected = reference.RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
        assert draw_crop(*size, scale, seed) == tuple(expected)


def test_scaled_decode_only_for_large_sources_and_close_to_the_full_one():
    assert decode_pil(jpeg(6, 199, 150), min_side=100).image.size == (199, 150)
    assert decode_pil(jpeg(6, 400, 200), min_side=100).image.size == (200, 100)
    assert decode_pil(jpeg(6, 400, 200), min_side=100).full_size == (400, 200)
    data, transform = jpeg(6, 640, 480), train_transform(64, 0.9)
    full = Image.open(io.BytesIO(data)).convert("RGB")
    random = reference.RandomResizedCrop(64, (0.9, 1.0), interpolation=InterpolationMode.BICUBIC)
    torch.manual_seed(3)
    expected = reference.functional.pil_to_tensor(random(full)).float()
    assert (transform(data, 3).float() - expected).abs().mean() < 2  # out of 255


def noisy_photograph(seed: int, width: int, height: int) -> bytes:
    """Return a JPEG with noise in every block, so that no wrong scale or kernel gives the same pixels by chance."""
    generator = np.random.default_rng(seed)
    smooth = np.asarray(Image.open(io.BytesIO(jpeg(seed, width, height))), dtype=float)
    noise = generator.normal(0, 25, smooth.shape)
    return saved(Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)), "JPEG", quality=90)


@pytest.mark.parametrize("crop_scale", [0.9, 0.3, 1.0])
def test_simplejpeg_gives_open_clips_pixels_but_for_rounding(crop_scale: float) -> None:
    exact, fast = (train_transform(224, crop_scale, one) for one in (decode_pil, decode_simplejpeg))
    for seed in range(3):
        data = noisy_photograph(seed, 512, 384)
        difference = (exact(data, seed).int() - fast(data, seed).int()).abs()
        assert difference.max() <= 2
        assert difference.float().mean() < 0.05


@pytest.mark.parametrize("decode", [decode_pil, decode_simplejpeg])
def test_a_crop_of_a_scaled_decode_stays_within_the_image(decode: Decode) -> None:
    data, transform = saved(Image.new("RGB", (202, 202), "white"), "JPEG"), train_transform(64, 0.9, decode)
    assert all(transform(data, seed).min() > 250 for seed in range(150)), "no row from beyond the border"


def test_a_broken_transform_is_not_taken_for_a_broken_image():
    with pytest.raises(ValueError, match="must be > 0"):
        EvalTransform(-1)(jpeg(9))


def test_squashing_keeps_the_whole_image():
    """The left half of the image is black and the right half is white, so each takes half the columns of the square."""
    image = Image.new("L", (120, 40))
    image.paste(255, (60, 0, 120, 40))
    data = saved(image, "PNG")
    pixels = TRANSFORMS["squash"](data).float()
    assert pixels[..., :14].max() < 10
    assert pixels[..., 18:].min() > 245
    image = image.convert("RGB")
    wanted = reference.Compose([reference.Resize((32, 32), InterpolationMode.BICUBIC), reference.PILToTensor()])(image)
    assert torch.equal(pixels.byte(), wanted)
    assert torch.equal(train_transform(32, 1.0, whole=EvalTransform(32, squash=True))(data), wanted)


RAMP = np.linspace(0, 65535, 40 * 30).reshape(30, 40)


def png(width: int, height: int, bits: int, color: int, rows: bytes) -> bytes:
    """Return a PNG built by hand, which may have 16 bits per channel or a wrong size in its header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_16(channels: int, color: int) -> bytes:
    values = np.repeat(RAMP[:, :, None], channels, axis=2).astype(">u2")
    return png(40, 30, 16, color, b"".join(b"\0" + row.tobytes() for row in values))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("channels", "color"), [(1, 0), (3, 2), (2, 4), (4, 6)], ids=["gray", "RGB", "LA", "RGBA"])
def test_16_bits_a_channel_become_their_high_byte(name: str, channels: int, color: int) -> None:
    found = pixels_of(DECODERS[name](png_16(channels, color), None))
    expected = RAMP.astype(np.uint16) >> 8
    assert (found[:, :, 0] == expected).all()  # PIL alone would clip: 254 of 256 values would be white


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
        red, _, blue = pixels_of(DECODERS[name](data, None))[15, 20].tolist()
        assert red > 200 and blue < 50


def test_an_eps_never_starts_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DecodeError, match="unknown image format"):
        decode_pil(BAD["EPS"])
    assert not (tmp_path / "started").exists()
