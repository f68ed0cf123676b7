"""Decoders agree with PIL; pixels depend on the seed alone and agree with torchvision's own pipeline."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from tars import jpeg
from torchvision import transforms as reference
from torchvision.transforms.functional import InterpolationMode

from neuclip_ds.data.decoders import Decode, Decoded, decode_pil
from neuclip_ds.data.images import EvalTransform, decode_simplejpeg, draw_crop, train_transform

MODES = [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("RGB", "WEBP")]
SCALED = {(900, 610): 100, (401, 333): 60, (640, 479): 240, (9, 900): 2}  # sizes with the shorter side that is wanted


def encoded(mode: str, kind: str, size: tuple[int, int] = (50, 37)) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(jpeg(1, *size))).convert(mode).save(out, kind)
    return out.getvalue()


TRANSFORMS = {
    "train": train_transform(32, 0.5),
    "plain": train_transform(32, 1.0),
    "eval": EvalTransform(32),
    "simplejpeg": train_transform(32, 0.5, decode_simplejpeg),
    "squash": EvalTransform(32, squash=True),
}


def pixels_of(decoded: Decoded) -> np.ndarray:
    """(H, W, 3), int."""
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
def test_odd_sizes(name, size):
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
    assert (transform(data, 3).float() - expected).abs().mean() < 2  # of 255


def noisy_photograph(seed: int, width: int, height: int) -> bytes:
    """A JPEG with detail in every block, of which no scale or kernel makes the same pixels by chance."""
    generator = np.random.default_rng(seed)
    smooth = np.asarray(Image.open(io.BytesIO(jpeg(seed, width, height))), dtype=float)
    noise = generator.normal(0, 25, smooth.shape)
    out = io.BytesIO()
    Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


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
    out = io.BytesIO()
    Image.new("RGB", (202, 202), "white").save(out, "JPEG")
    transform = train_transform(64, 0.9, decode)
    assert all(transform(out.getvalue(), seed).min() > 250 for seed in range(150)), "no row from beyond the border"


def test_a_broken_transform_is_not_taken_for_a_broken_image():
    with pytest.raises(ValueError, match="must be > 0"):
        EvalTransform(-1)(jpeg(9))


def test_squashing_keeps_the_whole_image():
    """Left half black, right half white: in a square of the whole image each has half of the columns."""
    image = Image.new("L", (120, 40))
    image.paste(255, (60, 0, 120, 40))
    out = io.BytesIO()
    image.save(out, "PNG")
    pixels = TRANSFORMS["squash"](out.getvalue()).float()
    assert pixels[..., :14].max() < 10
    assert pixels[..., 18:].min() > 245
    image = Image.open(out).convert("RGB")
    wanted = reference.Compose([reference.Resize((32, 32), InterpolationMode.BICUBIC), reference.PILToTensor()])(image)
    assert torch.equal(pixels.byte(), wanted)
    assert torch.equal(train_transform(32, 1.0, squash=True)(out.getvalue()), wanted)
