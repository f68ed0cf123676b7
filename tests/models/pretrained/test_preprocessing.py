"""Compare transformed images with those of transformers' image processors and of open_clip."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from miniatures import OPEN_CLIP_CONFIG, SAVERS
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from neuclip_ds.config import OPENAI_MEAN, OPENAI_STD
from neuclip_ds.data.images import EvalTransform
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import CheckpointRef, ModelSource, Preprocessing
from neuclip_ds.models.pretrained.locate import locate, open_checkpoint
from neuclip_ds.models.pretrained.open_clip_models import write_config
from neuclip_ds.models.pretrained.transformers_models import MODEL_TYPES

PROCESSOR = "preprocessor_config.json"
SIZE = 32
SQUARE = {"height": SIZE, "width": SIZE}


def picture(width: int = 96, height: int = 64) -> Image.Image:
    """Return an image of smooth noise, which differs between interpolations by more than rounding."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def transformed(preprocessing: Preprocessing) -> Tensor:
    """Return the picture as the model takes it: transformed and normalized, of shape (3, H, W)."""
    encoded = io.BytesIO()
    picture().save(encoded, "PNG")
    pixels = EvalTransform.of(preprocessing)(encoded.getvalue()) / 255
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return (pixels - mean) / std


@pytest.fixture(scope="module", params=["clip", "siglip"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    SAVERS[request.param](folder)
    return request.param, folder


def edited(folder: Path, options: dict[str, Any]) -> ModelSource:
    """Return the checkpoint after setting options of its image processor; None removes an option."""
    original = folder / "original.txt"
    if not original.exists():
        original.write_text((folder / PROCESSOR).read_text())
    tree = {**json.loads(original.read_text()), **options}
    (folder / PROCESSOR).write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))
    return open_checkpoint(locate(str(folder)))


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "clip": [
        {},
        {"resample": 2},
        {"size": {"shortest_edge": 40}},
        {"size": {"shortest_edge": 40}, "resample": 2, "do_normalize": False},
        {"size": SIZE, "crop_size": SIZE},  # as in files of old versions
        {"size": SQUARE},  # squashed, because both sides are given
        {"size": SQUARE, "do_center_crop": False},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
    ],
    "siglip": [{}, {"resample": 2}, {"do_normalize": False}, {"size": SQUARE, "do_center_crop": None}],
}


def test_images_equal_those_of_transformers(family: tuple[str, Path], tmp_path: Path) -> None:
    """Compare with the checkpoint's image processor, and with the image processor that an export contains."""
    name, folder = family
    for options in OPTIONS[name]:
        preprocessing = edited(folder, options).preprocessing
        MODEL_TYPES[name].processor(preprocessing).save_pretrained(tmp_path)
        mine = transformed(preprocessing)
        level = 1.01 / 255 / min(preprocessing.std)  # of a pixel: PIL and torchvision round differently
        for processor_folder in (folder, tmp_path):
            processor = AutoImageProcessor.from_pretrained(processor_folder)
            wanted = processor(picture(), return_tensors="pt")["pixel_values"][0]
            assert (mine - wanted).abs().max() < level, (options, processor_folder)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"resample": 1}, "sets resample=1"),
        ({"resample": 0}, "sets resample=0"),
        ({"do_resize": False}, "does not resize images"),
        ({"do_rescale": False}, "does not rescale pixels by 1/255"),
        ({"rescale_factor": 1.0}, "does not rescale pixels by 1/255"),
        ({"size": {"height": 32, "width": 48}}, "resizes whole images to 32 x 48 pixels"),
        ({"size": {"height": 40, "width": 40}, "do_center_crop": True, "crop_size": 32}, "are cropped again"),
        ({"size": {"longest_edge": 32}}, "resizes images to size {'longest_edge': 32}"),
        ({"size": {"shortest_edge": 32}, "do_center_crop": False}, "does not crop images to a square"),
        (
            {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 32, "width": 16}},
            "crops images to 32 x 16 pixels",
        ),
        (
            {"size": {"shortest_edge": 24}, "do_center_crop": True, "crop_size": 32},
            "pads images of 24 pixels to 32",
        ),
    ],
)
def test_options_of_transformers_that_are_not_applied_are_refused(
    family: tuple[str, Path], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        edited(family[1], options)
    assert f"{family[1]}/{PROCESSOR} " in str(caught.value)
    assert problem in str(caught.value)


def open_clip_source(folder: Path, preprocess: dict[str, Any]) -> ModelSource:
    folder.mkdir(exist_ok=True)
    content = {"model_cfg": OPEN_CLIP_CONFIG, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    return open_checkpoint(CheckpointRef("open_clip", str(folder)))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "random", None])
@pytest.mark.parametrize("resize_mode", ["shortest", "squash", None])
def test_images_equal_those_of_open_clip(interpolation: str | None, resize_mode: str | None, tmp_path: Path) -> None:
    """Compare with the checkpoint's config, and with the config that an export contains."""
    options = {"mean": OPENAI_MEAN, "std": 0.5, "interpolation": interpolation, "resize_mode": resize_mode}
    preprocessing = open_clip_source(tmp_path, options).preprocessing
    mine = transformed(preprocessing)
    write_config(tmp_path, OPEN_CLIP_CONFIG, preprocessing)
    exported = json.loads((tmp_path / "open_clip_config.json").read_text())["preprocess_cfg"]
    for preprocess in (options, exported):
        wanted = open_clip.transform.image_transform(SIZE, is_train=False, **preprocess)(picture())
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("option", [{"resize_mode": "longest"}, {"interpolation": "nearest"}])
def test_options_of_open_clip_that_are_not_applied_are_refused(option: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_clip_source(tmp_path, option)
    for key, value in option.items():
        assert f"{key}={value}" in str(caught.value)


def test_stored_outputs_name_only_unusual_options() -> None:
    """Outputs of towers that were stored before there were these options stay usable."""
    usual = Preprocessing(size=SIZE, mean=OPENAI_MEAN, std=OPENAI_STD)
    unusual = Preprocessing(size=SIZE, mean=OPENAI_MEAN, std=OPENAI_STD, margin=8, interpolation="bilinear")
    assert unusual.to_json() == {**usual.to_json(), "margin": 8, "interpolation": "bilinear"}
    assert usual.to_json().keys() == {"size", "mean", "std", "squash"}
