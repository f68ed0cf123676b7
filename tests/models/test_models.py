"""Towers and tokenizer: sizes of the published models, pooling at the first EOS, precision, mistakes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder, parameter_count
from neuclip_ds.models.tokenizer import CaptionTokenizer, train_bpe

CAPTIONS = ["A red circle on the left.", "two  small\tblue squares", "ünïcode Ä und ein Stern"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> CaptionTokenizer:
    return train_bpe(CAPTIONS, 300, 12)


def tiny(image_size: int = 32, **changes: object) -> ModelConfig:
    options = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return ModelConfig.model_validate(
        {
            "vision": {"name": "vit_tiny_patch16_224", "image_size": image_size, "options": options},
            "text": {"width": 32, "layers": 2, "heads": 2, "context_length": 12, "vocab_size": 300},
            "embed_dim": 16,
            **changes,
        }
    )


def inputs(tokenizer: CaptionTokenizer, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    image = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return image, tokenizer(CAPTIONS[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_float32_unit_rows(tokenizer: CaptionTokenizer, dtype: torch.dtype) -> None:
    model = build_dual_encoder(tiny(), tokenizer).to(dtype)
    for features in model(*inputs(tokenizer)):
        assert features.dtype == torch.float32
        assert features.shape == (3, 16)
        torch.testing.assert_close(features.norm(dim=1), torch.ones(3), rtol=0, atol=1e-5)
    assert model(inputs(tokenizer)[0], None)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resnets(tokenizer: CaptionTokenizer, dtype: torch.dtype) -> None:
    for name in ("resnet10t", "resnet50_clip"):
        config = tiny(64, vision={"name": name, "image_size": 64})
        model = build_dual_encoder(config, tokenizer).to(dtype)
        image, text = model(*inputs(tokenizer, 64))
        (image.sum() + text.sum()).backward()
        assert torch.isfinite(image).all()


def test_pooling_is_at_the_first_end_token(tokenizer: CaptionTokenizer) -> None:
    model = build_dual_encoder(tiny(), tokenizer).eval()
    tokens = tokenizer(["a red circle"])
    end = int((tokens[0] == tokenizer.eos_id).nonzero()[0])
    changed = tokens.clone()
    changed[0, end + 1 :] = 200
    assert torch.equal(model(None, tokens)[1], model(None, changed)[1])
    changed[0, 1] = 200
    assert not torch.equal(model(None, tokens)[1], model(None, changed)[1])


def test_activation_checkpointing_changes_no_gradient(tokenizer: CaptionTokenizer) -> None:
    grads = []
    for switch in (False, True):
        torch.manual_seed(0)
        model = build_dual_encoder(tiny(activation_checkpointing=switch), tokenizer).train()
        image, text = model(*inputs(tokenizer))
        (image * text).sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def published(vision: str, embed_dim: int, width: int = 512, heads: int = 8, layers: int = 12) -> DualEncoder:
    class Sizes:
        vocab_size, bos_id, eos_id, pad_id = 49408, 49406, 49407, 49407

    config = ModelConfig.model_validate(
        {
            "vision": {"name": vision},
            "text": {"width": width, "heads": heads, "layers": layers},
            "embed_dim": embed_dim,
        }
    )
    with torch.device("meta"):
        return build_dual_encoder(config, Sizes())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vision", "total"), [("vit_base_patch32_clip_224", 151_277_313), ("vit_base_patch16_clip_224", 149_620_737)]
)
def test_openai_models_have_their_published_size(vision: str, total: int) -> None:
    assert parameter_count(published(vision, 512)) == total - 1  # the logit scale is kept by the objective


def test_vit_huge_has_its_published_image_tower() -> None:
    model = published("vit_huge_patch14_clip_224", 1024, width=1024, heads=16, layers=24)
    assert parameter_count(model.vision) == 632_076_800
    assert parameter_count(model) == 986_109_440


def test_tokens(tokenizer: CaptionTokenizer, tmp_path: Path) -> None:
    rows = tokenizer(["", "  A RED\n circle ", "a red circle", "star " * 50])
    assert rows.shape == (4, 12)
    assert rows[0, :3].tolist() == [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert torch.equal(rows[1], rows[2])
    assert rows[3, -1] == tokenizer.eos_id
    tokenizer.save(tmp_path)
    assert torch.equal(CaptionTokenizer.load(tmp_path, 12)(CAPTIONS), tokenizer(CAPTIONS))
    assert torch.equal(pickle.loads(pickle.dumps(tokenizer))(CAPTIONS), tokenizer(CAPTIONS))
    again = train_bpe(CAPTIONS, 300, 12)
    assert torch.equal(again(CAPTIONS), tokenizer(CAPTIONS))


def test_mistakes(tokenizer: CaptionTokenizer) -> None:
    with pytest.raises(UserError, match="no captions"):
        train_bpe([], 300, 12)
    with pytest.raises(UserError, match="vit_base_patch32"):
        build_dual_encoder(tiny(vision={"name": "vit_bas_patch32_clip_224"}), tokenizer)
    with pytest.raises(UserError, match="use 48 or 56"):
        build_dual_encoder(tiny(image_size=50), tokenizer)
    with pytest.raises(UserError, match="neither"):
        CaptionTokenizer.load("/no/such/tokenizer", 12)
