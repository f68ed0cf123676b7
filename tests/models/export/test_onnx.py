"""Both towers as ONNX give torch's features in onnxruntime, for every kind of model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from miniatures import CAPTIONS, images, save_clip, save_open_clip, save_siglip2
from test_formats import TEXT, TINY_VIT, Trained, features, trained
from test_text_encoders import mt5, xlm_roberta
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from transformers import AutoImageProcessor, AutoTokenizer

from neuclip_ds.models.export.onnx import write_onnx
from neuclip_ds.models.pretrained.base import LogitParameters

VIT = {"name": "vit_base_patch32_clip_224", "image_size": 32, "options": TINY_VIT}


def both(save: Callable[[Path], object], folder: Path) -> dict[str, Any]:
    save(folder)
    return {"pretrained": str(folder)}


def encoder(save: Callable[[Path], object], folder: Path) -> dict[str, Any]:
    save(folder)
    return {"pretrained": str(folder), "context_length": 16}


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "clip": lambda folder: both(save_clip, folder),
    "siglip2": lambda folder: both(save_siglip2, folder),
    "open_clip": lambda folder: both(save_open_clip, folder),
    "scratch": lambda folder: {"vision": VIT, "text": TEXT, "embed_dim": 16},
    "xlm_roberta": lambda folder: {"vision": VIT, "text": encoder(xlm_roberta, folder)},
    "mt5": lambda folder: {"vision": {"name": "resnet10t", "image_size": 32}, "text": encoder(mt5, folder)},
}


def written(model: Trained, folder: Path) -> Path:
    folder.mkdir()
    write_onnx(model.model, model.tokenizer, model.source.preprocessing, LogitParameters(0.02, None), folder)
    return folder


def by_onnxruntime(folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Return features without torch, from the folder's own processor and tokenizer."""
    pictures = [to_pil_image(picture) for picture in images(size)]
    pixels = AutoImageProcessor.from_pretrained(folder)(pictures, return_tensors="np")["pixel_values"]
    options = {"padding": "max_length", "truncation": True, "max_length": 16, "return_tensors": "np"}
    ids = AutoTokenizer.from_pretrained(folder)(CAPTIONS[:2], **options)["input_ids"]
    vision, text = (onnxruntime.InferenceSession(str(folder / f"{name}_model.onnx")) for name in ("vision", "text"))
    image = vision.run(["image_embeds"], {"pixel_values": pixels})[0]
    return torch.from_numpy(image), torch.from_numpy(text.run(["text_embeds"], {"input_ids": ids})[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_features_are_torchs(name: str, tmp_path: Path) -> None:
    model = trained(**SOURCES[name](tmp_path / "from"))
    out = written(model, tmp_path / "out")
    for found, wanted in zip(by_onnxruntime(out, 32), features(model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    config = json.loads((out / "clip_config.json").read_text())
    assert config == {"image_size": 32, "context_length": 16, "logit_scale": pytest.approx(50), "logit_bias": None}
    assert not any(str(tmp_path) in path.read_text() for path in out.glob("*.json"))
