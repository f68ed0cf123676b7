"""Pretrained models at another resolution and context length than their checkpoints'."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from miniatures import CAPTIONS, OPEN_CLIP_CONFIG, PE_CONFIG, SAVERS, images, no_training, save_open_clip

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.locate import locate, open_checkpoint
from neuclip_ds.models.source import locate_model, model_source, open_saved


@pytest.mark.parametrize("family", SAVERS)
def test_both_towers_at_other_sizes(family: str, tmp_path: Path) -> None:
    SAVERS[family](tmp_path / "published")
    config = ModelConfig(pretrained=str(tmp_path / "published"), force_image_size=48, force_context_length=24)
    source = model_source(config, locate_model(config))
    tokenizer = source.tokenizer(no_training)
    assert source.preprocessing.size == 48
    assert tokenizer(CAPTIONS).shape == (4, 24)
    model, logits = source.load(tokenizer)
    published = open_checkpoint(locate(config.pretrained)).load().model
    longer = model.eval()(images(48), tokenizer(CAPTIONS))
    assert all(part.isfinite().all() for part in longer)
    changed = {
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value, published.state_dict().get(name, value))
    } | {name for name, value in model.state_dict().items() if value.shape != published.state_dict()[name].shape}
    assert len(changed) == 2
    assert all("position" in name for name in changed)
    source.save(tmp_path / "run", logits)
    again, _ = open_saved(config, tmp_path / "run")
    again.build(tokenizer).load_state_dict(model.state_dict())
    assert again.preprocessing.size == 48


def test_open_clips_own_sizes_are_the_same(tmp_path: Path) -> None:
    """With open_clip's `force_image_size` and `force_context_length`."""
    save_open_clip(tmp_path)
    model = forced(tmp_path, force_image_size=48, force_context_length=24).load().model.eval()
    theirs = by_open_clip(OPEN_CLIP_CONFIG, tmp_path, force_image_size=48, force_context_length=24)
    ids = torch.randint(1, 49406, (4, 24), generator=torch.Generator().manual_seed(0))
    pixels = model.vision.normalize(images(48))
    with torch.no_grad():
        torch.testing.assert_close(model.vision(images(48)), theirs.encode_image(pixels), rtol=0, atol=1e-5)
        torch.testing.assert_close(model.text(ids), theirs.encode_text(ids), rtol=0, atol=1e-5)


def test_a_perception_encoder_at_another_resolution(tmp_path: Path) -> None:
    """Its image tower is timm's, with rotary and learned positions."""
    save_open_clip(tmp_path, PE_CONFIG)
    checkpoint = forced(tmp_path, force_image_size=64, force_context_length=24)
    model = checkpoint.load().model.eval()
    theirs = by_open_clip(PE_CONFIG, tmp_path, force_image_size=64)
    with torch.no_grad():
        wanted = theirs.encode_image(model.vision.normalize(images(64)))
        torch.testing.assert_close(model.vision(images(64)), wanted, rtol=0, atol=1e-5)
    assert checkpoint.tokenizer()(CAPTIONS).shape == (4, 24)
    with pytest.raises(UserError, match="of a timm image tower"):
        checkpoint.package(checkpoint.tokenizer(), model.state_dict(), checkpoint.load().logits)


@pytest.mark.parametrize("family", ["clip", "open_clip"])
def test_sizes_that_cannot_be(family: str, tmp_path: Path) -> None:
    SAVERS[family](tmp_path)
    with pytest.raises(UserError, match=r"model\.force_image_size=36 is not divisible .* of 8 pixels; use 32 or 40"):
        forced(tmp_path, force_image_size=36)


def forced(folder: Path, **sizes: Any) -> Any:
    return open_checkpoint(locate(str(folder)), ModelConfig(pretrained=str(folder), **sizes))


def by_open_clip(config: dict[str, Any], folder: Path, **sizes: int) -> Any:
    """Return a checkpoint at forced sizes, loaded by open_clip alone."""
    open_clip.factory._MODEL_CONFIGS["miniature"] = config
    try:
        weights = str(folder / "open_clip_model.safetensors")
        return open_clip.create_model("miniature", pretrained=weights, **sizes).eval()
    finally:
        del open_clip.factory._MODEL_CONFIGS["miniature"]
