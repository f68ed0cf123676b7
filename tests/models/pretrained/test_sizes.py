"""Image size and context length of checkpoints, and options that a checkpoint replaces."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
import yaml
from miniatures import (
    CAPTIONS,
    OPEN_CLIP_CONFIG,
    SAVERS,
    images,
    save_clip,
    save_open_clip,
    small,
    xlm_roberta_tokenizer,
)
from torch import Tensor
from torch.nn.functional import normalize
from transformers import XLMRobertaConfig, XLMRobertaModel

from neuclip_ds.config import ModelConfig, dump
from neuclip_ds.errors import UserError
from neuclip_ds.models.conversion import write_library_model
from neuclip_ds.models.pretrained.base import LogitParameters
from neuclip_ds.models.source import locate_model, model_source, open_saved
from neuclip_ds.recipe import load_saved, parse

REPLACED = {
    "model.vision.name": "resnet50",
    "model.vision.options": '{"depth": 3}',
    "model.vision.patch_drop": "0.5",
    "model.vision.mean": "[0.5, 0.5, 0.5]",
    "model.vision.projection": "mlp",
    "model.text.tokenizer": "clip_bpe",
    "model.text.width": "64",
    "model.embed_dim": "512",  # the default
}


@pytest.mark.parametrize("name", REPLACED)
def test_options_that_a_checkpoint_replaces_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"the checkpoint of model.pretrained determines {name}"):
        parse(["demo", "--model.pretrained=x", f"--{name}={REPLACED[name]}"])


def test_a_recipes_architecture_gives_way_to_a_checkpoint(tmp_path: Path) -> None:
    """Sizes are kept only if they belong to a checkpoint, such as one whose path the command line replaces."""
    model = parse(["demo", "--model.pretrained=x"]).config.model
    assert (model.vision.image_size, model.text.context_length, model.vision.options) == (None, None, {})
    model = parse(["demo", "--model.pretrained=x", "--model.vision.image_size=64"]).config.model
    assert (model.vision.image_size, model.text.context_length) == (64, None)
    recipe = tmp_path / "larger.yaml"
    recipe.write_text("include: [demo]\nmodel: {pretrained: x, vision: {image_size: 336}}\n")
    model = parse([str(recipe), "--model.pretrained=copy_of_x"]).config.model
    assert (model.pretrained, model.vision.image_size) == ("copy_of_x", 336)


def test_configs_of_earlier_runs_with_such_options_can_be_read(tmp_path: Path) -> None:
    tree = yaml.safe_load(dump(parse(["demo"]).config))
    tree["model"]["pretrained"] = "x"
    tree["model"]["embed_dim"] = 512
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    for model in (load_saved(path).model, parse([str(path)]).config.model):
        assert (model.pretrained, model.embed_dim) == ("x", 512)


@pytest.mark.parametrize("option", ["--model.pretrained=x", "--model.text.pretrained=x"])
def test_written_configs_are_recipes_and_omit_what_is_replaced(option: str, tmp_path: Path) -> None:
    config = parse(["demo", option]).config
    text = dump(config)
    (tmp_path / "again.yaml").write_text(text)
    assert dump(parse([str(tmp_path / "again.yaml")]).config) == text
    model = yaml.safe_load(text)["model"]
    assert "width" not in model["text"]
    assert ("embed_dim" in model) == (option != "--model.pretrained=x")


def opened(folder: Path, image_size: int | None = None, context_length: int | None = None) -> Any:
    sizes = {"vision": {"image_size": image_size}, "text": {"context_length": context_length}}
    config = ModelConfig.model_validate({"pretrained": str(folder), **sizes})
    return model_source(config, locate_model(config))


@pytest.mark.parametrize("family", SAVERS)
def test_resized_checkpoints(family: str, tmp_path: Path) -> None:
    """Embeddings equal open_clip's; preprocessing, tokenizer, saved source and export have the new sizes."""
    SAVERS[family](tmp_path / "model")
    before = opened(tmp_path / "model").load().model.state_dict()
    source = opened(tmp_path / "model", image_size=48, context_length=24)
    tokenizer = source.own_tokenizer()
    tokens = tokenizer(CAPTIONS)
    assert (source.preprocessing.size, tokens.shape[1]) == (48, 24)
    model, logits = source.load(tokenizer)
    after = model.state_dict()
    changed = [name for name in after if after[name].shape != before[name].shape]
    assert len(changed) == 2
    image, text = changed
    torch.testing.assert_close(after[image], open_clip_patches(before[image], 6), rtol=0, atol=1e-6)
    torch.testing.assert_close(after[text], open_clip_tokens(before[text], 24), rtol=0, atol=1e-6)
    for name in after.keys() - set(changed):
        assert torch.equal(after[name], before[name])
    with torch.no_grad():
        features = model.eval()(images(48), tokens)

    source.save(tmp_path / "saved", logits)
    saved, _ = open_saved(source.config, tmp_path / "saved")
    rebuilt = saved.build(saved.own_tokenizer() or tokenizer).eval()
    rebuilt.load_state_dict(after)
    assert saved.preprocessing == source.preprocessing
    library = saved.to_library_model(tokenizer, after, logits)
    (tmp_path / "export").mkdir()
    write_library_model(library, library.library, tmp_path / "export")
    exported = opened(tmp_path / "export").load().model.eval()
    with torch.no_grad():
        for other in (rebuilt, exported):
            for mine, theirs in zip(features, other(images(48), tokens), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def open_clip_patches(table: Tensor, side: int) -> Tensor:
    """Return open_clip's result, which requires a class token: models without one get a temporary one."""
    rows = table if math.isqrt(len(table)) ** 2 != len(table) else torch.cat([table[:1], table])
    state = {"visual.positional_embedding": rows}
    open_clip.model.resize_pos_embed(state, SimpleNamespace(visual=SimpleNamespace(grid_size=side)))
    return state["visual.positional_embedding"][len(rows) - len(table) :]


def open_clip_tokens(table: Tensor, length: int) -> Tensor:
    state = {"positional_embedding": table}
    new = SimpleNamespace(positional_embedding=torch.empty(length, table.shape[1]))
    open_clip.model.resize_text_pos_embed(state, new)
    return state["positional_embedding"]


@pytest.mark.parametrize("family", ["clip", "open_clip"])
def test_sizes_that_are_no_whole_patches_are_refused(family: str, tmp_path: Path) -> None:
    SAVERS[family](tmp_path)
    with pytest.raises(UserError, match=r"size of 50 pixels .*patches of 8 pixels; use 48 or 56"):
        opened(tmp_path, image_size=50)
    file = next(path for path in tmp_path.glob("*config.json") if "image_size" in path.read_text())
    file.write_text(file.read_text().replace('"image_size": 32', '"image_size": 33'))
    assert opened(tmp_path, image_size=33).preprocessing.size == 33, "the checkpoint's own"


def test_resized_timm_towers_of_open_clip(tmp_path: Path) -> None:
    """open_clip builds timm's models only at their own size, so the tower becomes timm's model of the new size."""
    vision = {"image_size": 384, "timm_model_name": "vit_tiny_patch16_384", "timm_pool": "", "timm_proj": "linear"}
    save_open_clip(tmp_path / "model", {**OPEN_CLIP_CONFIG, "custom_text": True, "vision_cfg": vision})
    source = opened(tmp_path / "model", image_size=224)
    model, logits = source.load()
    tower = open_clip.create_model(f"local-dir:{tmp_path}/model", force_image_size=224).visual.eval()
    pixels = images(224, rows=1)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ([0.4, 0.5, 0.6], [0.2, 0.25, 0.3]))
    with torch.no_grad():
        expected = normalize(tower((pixels / 255 - mean) / std), dim=1)
        image, _ = model.eval()(pixels, source.own_tokenizer()(CAPTIONS))
    torch.testing.assert_close(image, expected, rtol=0, atol=1e-6)
    source.save(tmp_path / "saved", logits)
    saved, _ = open_saved(source.config, tmp_path / "saved")
    (tmp_path / "export").mkdir()
    library_model = saved.to_library_model(source.own_tokenizer(), model.state_dict(), logits)
    write_library_model(library_model, "open_clip", tmp_path / "export")
    exported = open_clip.create_model(f"local-dir:{tmp_path}/export").visual.eval()
    with torch.no_grad():
        torch.testing.assert_close(normalize(exported((pixels / 255 - mean) / std), dim=1), image, rtol=0, atol=1e-6)


def test_sizes_that_open_clip_cannot_export_are_refused_before_training(tmp_path: Path) -> None:
    """Runs of earlier versions could train at them, and can still be opened."""
    vision = {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}
    config = {**OPEN_CLIP_CONFIG, "custom_text": True, "vision_cfg": vision}
    save_open_clip(tmp_path / "model", config)
    with pytest.raises(UserError, match=r"image_size=64: open_clip supports timm's 'test_vit' only for images of 160"):
        opened(tmp_path / "model", image_size=64)
    path = tmp_path / "model" / "open_clip_config.json"
    path.write_text(path.read_text().replace('"image_size": 160', '"image_size": 64'))
    earlier = opened(tmp_path / "model")
    weights = earlier.build().state_dict()
    with pytest.raises(UserError, match="with images of 64 instead of 160 pixels"):
        earlier.to_library_model(earlier.own_tokenizer(), weights, LogitParameters(None, None))


def test_a_saved_checkpoint_keeps_its_size(tmp_path: Path) -> None:
    """Configs of earlier versions have sizes that had no effect."""
    save_clip(tmp_path / "model")
    source = opened(tmp_path / "model")
    source.save(tmp_path / "saved", LogitParameters(None, None))
    config = ModelConfig.model_validate({"pretrained": str(tmp_path / "model"), "vision": {"image_size": 224}})
    saved, _ = open_saved(config, tmp_path / "saved")
    assert saved.preprocessing.size == 32


def test_captions_longer_than_an_encoders_positions_are_refused(tmp_path: Path) -> None:
    tokenizer = xlm_roberta_tokenizer()
    config = small(32, vocab_size=len(tokenizer), max_position_embeddings=66, bos_token_id=0, pad_token_id=1)
    XLMRobertaModel(XLMRobertaConfig(**config, eos_token_id=2, type_vocab_size=1)).save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    text = {"hf_model_name": str(tmp_path / "text"), "hf_pooler_type": "mean_pooler", "hf_proj_type": "linear"}
    save_open_clip(tmp_path / "model", {**OPEN_CLIP_CONFIG, "custom_text": True, "text_cfg": text})
    opened(tmp_path / "model", context_length=64).build()
    with pytest.raises(UserError, match=r"context_length=65 is more than the 64 tokens"):
        opened(tmp_path / "model", context_length=65).build()
