import copy
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from neuclip_ds.config import ModelConfig, TextConfig, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.bpe import train_bpe
from neuclip_ds.models.build import build_dual_encoder, new_text_tower
from neuclip_ds.models.image_models import new_vision_tower
from neuclip_ds.models.recompute import checkpoint_activations, checkpointed_blocks
from neuclip_ds.models.towers import DualEncoder, TextTower, VisionTower

pytestmark = pytest.mark.usefixtures("quick_meta_models")

TOKENIZE = train_bpe(["a dog runs", "two cats sleep", "a dog and a cat"], vocab_size=300, context_length=12)
TEXT = TextConfig(vocab_size=300, context_length=12, width=32, layers=2, heads=2)
VIT = VisionConfig(
    name="vit_tiny_patch16_224",
    image_size=32,
    options={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
)
TINY = ModelConfig(vision=VIT, text=TEXT, embed_dim=16)
CAPTIONS = ["a dog", "two cats sleep", ""]
RESNET = VisionConfig(name="resnet18", image_size=32, options={"layers": [1, 1, 1, 1]})


def pixels(side: int, rows: int = 2) -> Tensor:
    return torch.randint(0, 256, (rows, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def text_tower(tokenizer: Any = TOKENIZE, config: TextConfig = TEXT) -> TextTower:
    torch.manual_seed(0)
    return new_text_tower(config, tokenizer, embed_dim=16)


def vision_tower(config: VisionConfig) -> VisionTower:
    torch.manual_seed(0)
    return new_vision_tower(config, embed_dim=16)


def gradients(tower: nn.Module, inputs: Tensor) -> list[Tensor]:
    tower.train()
    tower.zero_grad()
    tower(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in tower.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("config", [VIT, RESNET], ids=["vit", "resnet"])
def test_pixels_are_normalized_per_channel(config: VisionConfig) -> None:
    tower = vision_tower(config).eval()
    image = pixels(32)
    mean, std = (torch.tensor(values)[:, None, None] for values in config.statistics())
    normalized = (image.double() / 255 - mean) / std
    expected = tower.projection(tower.trunk(normalized.float()))
    torch.testing.assert_close(tower(image), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(image, pixels(32))  # unchanged
    with pytest.raises(TypeError, match="uint8"):
        tower(pixels(32).float())


@pytest.mark.parametrize("move", [lambda tower: tower, lambda tower: tower.bfloat16()], ids=["float32", "bf16"])
def test_normalized_pixels_are_float32_with_a_rounding_error_of_at_most_4e_7(move: Any) -> None:
    """The bound is for all pixel values with OpenAI's statistics, whatever the dtype of the weights."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in VIT.statistics())
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    normalized = move(vision_tower(VIT)).normalize(values)
    assert normalized.dtype == torch.float32
    expected = (values.double() / 255 - mean) / std
    torch.testing.assert_close(normalized.double(), expected, rtol=0, atol=4e-7)


@pytest.mark.parametrize(
    ("name", "options", "side", "width"),
    [
        ("vit_base_patch32_clip_quickgelu_224", {"depth": 1}, 224, 768),
        ("vit_base_patch16_siglip_224", {"depth": 1}, 224, 768),
        ("resnet50", {"layers": [1, 1, 1, 1]}, 64, 2048),
        ("resnet50_clip_gap", {}, 64, 2048),
        ("convnext_tiny", {"depths": [1, 1, 1, 1]}, 100, 768),
        ("swin_tiny_patch4_window7_224", {"depths": [1, 1, 1, 1]}, 56, 768),
    ],
)
def test_towers_of_all_families_end_in_one_projection_without_bias(
    name: str, options: dict[str, Any], side: int, width: int
) -> None:
    with torch.device("meta"):
        tower = new_vision_tower(VisionConfig(name=name, image_size=side, options=options), 64).eval()
        assert tower(torch.empty(2, 3, side, side, dtype=torch.uint8)).shape == (2, 64)
    assert tower.projection.weight.shape == (64, width)
    assert tower.projection.bias is None
    assert isinstance(tower.trunk.get_classifier(), nn.Identity)


def test_attention_pools_own_projection_is_the_only_one() -> None:
    """OpenAI's RN50 image tower has 38,316,896 parameters with a grid of 7 x 7 positions; here, the grid is 1 x 1."""
    tower = vision_tower(VisionConfig(name="resnet50_clip", image_size=32)).bfloat16()
    projection = tower.trunk.head.proj
    assert not list(tower.projection.parameters())
    difference = (1024 - 16) * 2049 + 48 * 2048  # for 1,024 features instead of 16, and for the other 48 positions
    assert sum(parameter.numel() for parameter in tower.parameters()) == 38_316_896 - difference
    assert projection.weight.float().std().item() == pytest.approx(2048**-0.5, rel=0.05)
    assert (projection.bias == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients(tower, pixels(32)))


@pytest.mark.parametrize("build", [lambda: vision_tower(VIT), text_tower], ids=["vision", "text"])
def test_initial_weights_depend_only_on_the_seed_and_projections_begin_as_in_clip(build) -> None:
    tower = build()
    same = build().state_dict()
    assert tower.projection.weight.std().item() == pytest.approx(32**-0.5, rel=0.15)
    assert all(torch.equal(tensor, same[name]) for name, tensor in tower.state_dict().items())


BLOCKS = {
    "vit": (lambda: vision_tower(VIT), pixels(32), 2),
    "resnet": (lambda: vision_tower(RESNET), pixels(32, rows=4), 4),
    "text": (text_tower, TOKENIZE(["a dog", "two cats sleep"]), 2),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_checkpointing_any_number_of_blocks_keeps_all_bits(name: str) -> None:
    """Gradients and batch norm statistics stay bit-identical, also in a copy of the tower."""
    build, inputs, count = BLOCKS[name]
    plain = build()
    expected = gradients(plain, inputs)
    blocks = checkpointed_blocks(plain, "vision", True)
    assert len(blocks) == count
    for setting in (1, True, count + 5):
        original = build()
        checkpoint_activations(original, "vision", setting)
        tower = copy.deepcopy(original)
        calls: list[str] = []
        for block in blocks:
            inner = next(layer for layer in tower.get_submodule(block).modules() if not list(layer.children()))
            inner.register_forward_hook(lambda *_, block=block, calls=calls: calls.append(block))
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(tower, inputs), strict=True))
        assert all(
            torch.equal(tensor, running_statistics(tower)[key]) for key, tensor in running_statistics(plain).items()
        )
        recomputed = blocks if setting is True else blocks[:setting]
        assert calls == blocks + recomputed[::-1], "the first blocks run once more in the backward pass"
        assert not [parameter for parameter in original.parameters() if parameter.grad is not None]


def running_statistics(tower: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of a tower's batch-norm layers."""
    return {name: buffer for name, buffer in tower.named_buffers() if "running" in name}


def test_a_model_without_blocks_cannot_checkpoint() -> None:
    tower = vision_tower(VIT)
    tower.trunk = nn.Flatten()
    with pytest.raises(UserError, match=r"The vision tower has no list of blocks .*activation_checkpointing=false"):
        checkpoint_activations(tower, "vision", True)
    checkpoint_activations(tower, "vision", False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (VisionConfig(name="vit_base_patch32_clip_22"), "did you mean vit_base_patch32_clip_224"),
        (VisionConfig(name="vit_base_patch32_clip_224.openai"), "names pretrained weights"),
        (VisionConfig(name="dm_nfnet_f0"), "0-dimensional"),
        (VIT.model_copy(update={"image_size": 50}), "is not divisible into patches of 8 pixels.*use 48 or 56"),
        (VIT.model_copy(update={"options": {"patch_size": [8, 12]}}), "patches of 12 pixels.*use 24 or 36"),
        (VisionConfig(name="vit_base_patch32_clip_224", image_size=16), "use 32 or more"),
        (VisionConfig(name="resnet50", image_size=16), "smaller than the model.s stride of 32 pixels"),
        (VIT.model_copy(update={"options": {"patchsize": 8}}), "patchsize"),
        (VIT.model_copy(update={"options": {"in_chans": 1}}), "timm cannot build"),
        (VIT.model_copy(update={"options": {"img_size": 64}}), "must not set img_size"),
        (VisionConfig(name="resnet50", options={"global_pool": ""}), "no pooled feature"),
    ],
)
def test_mistakes_in_the_vision_config_are_user_errors(config: VisionConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        new_vision_tower(config, 16)


@pytest.mark.parametrize("eos", [1, 2, 7])
def test_the_feature_is_read_at_the_first_eos(eos: int) -> None:
    """The feature is read at the first EOS even if its id is 2, for which transformers reads at the largest id."""
    tower = text_tower(SimpleNamespace(vocab_size=300, context_length=12, bos_id=0, eos_id=eos, pad_id=eos)).eval()
    row = torch.tensor([[0, 40, 50, eos, 60, 299, eos, 70, eos, eos, 80, 20]])
    other_end, other_start = row.clone(), row.clone()
    other_end[:, 4:] = torch.tensor([90, eos, 298, 3, 4, 5, 6, 8])
    other_start[:, 1] = 41
    assert torch.equal(tower(row), tower(other_end))
    assert not torch.allclose(tower(row), tower(other_start))
    expected = tower.projection(tower.trunk(input_ids=row).last_hidden_state[:, 3])
    torch.testing.assert_close(tower(row), expected)
    torch.testing.assert_close(tower(row[:, :4]), expected)  # without any tokens after EOS


def test_text_weights_begin_as_in_clip() -> None:
    tower = text_tower(config=TextConfig(vocab_size=300, context_length=12, width=128, layers=4, heads=4)).trunk
    input_std = 128**-0.5
    output_std = input_std * 8**-0.5
    for layer in tower.encoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
            assert weight.std().item() == pytest.approx(input_std, rel=0.05)
        assert attention.out_proj.weight.std().item() == pytest.approx(output_std, rel=0.05)
        assert mlp.fc1.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
        assert mlp.fc2.weight.std().item() == pytest.approx(output_std, rel=0.05)
    assert tower.embeddings.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_patches_are_dropped_in_training_only() -> None:
    tower = vision_tower(VIT.model_copy(update={"patch_drop": 0.5}))
    assert not torch.equal(tower(pixels(32)), tower(pixels(32)))
    assert torch.equal(tower.eval()(pixels(32)), tower(pixels(32)))
    with pytest.raises(UserError, match=r"patch_drop=0\.5 .*patch_drop_rate"):
        vision_tower(RESNET.model_copy(update={"patch_drop": 0.5}))


def built(config: ModelConfig = TINY) -> DualEncoder:
    torch.manual_seed(0)
    return build_dual_encoder(config, TOKENIZE)


def test_features_are_float32_on_the_unit_sphere_and_near_in_bf16() -> None:
    """Either the images or the captions may be absent."""
    model = built().eval()
    images = pixels(32, 3)
    tokens = TOKENIZE(CAPTIONS)
    with torch.no_grad():
        exact = model(images, tokens)
        image, no_text = model(images, None)
        no_image, text = model(None, tokens)
        rounded = model.bfloat16()(images, tokens)
    assert torch.equal(image, exact[0]) and no_text is None
    assert torch.equal(text, exact[1]) and no_image is None
    for feature in (*exact, *rounded):
        assert (feature.shape, feature.dtype) == ((3, 16), torch.float32)
        torch.testing.assert_close(feature.norm(dim=1), torch.ones(3), rtol=0, atol=1e-5)
    for a, b in zip(exact, rounded, strict=True):
        assert ((a * b).sum(dim=1) > 0.999).all()


def test_a_named_tokenizer_gives_its_own_vocabulary() -> None:
    text = TEXT.model_copy(update={"tokenizer": "somewhere", "vocab_size": 49408})
    model = build_dual_encoder(TINY.model_copy(update={"text": text}), TOKENIZE)
    assert model.text.trunk.embeddings.token_embedding.num_embeddings == TOKENIZE.vocab_size


@pytest.mark.parametrize(
    ("name", "image_size", "statistics"),
    [("vit_small_patch16_dinov3", 64, (0.485, 0.456, 0.406)), ("vit_base_patch16_siglip_256", 256, (0.5, 0.5, 0.5))],
)
def test_towers_of_dinov3_and_siglip_2_are_built(name: str, image_size: int, statistics: tuple[float, ...]) -> None:
    """DINOv3 pools the mean over patches, and SigLIP 2 pools by attention: both need all tokens of the last block."""
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 2}
    vision = VisionConfig(name=name, image_size=image_size, options=sizes)
    pretrained_cfg = timm.get_pretrained_cfg(name)
    assert any(marker in tag for tag in timm.list_pretrained(f"{name}.*") for marker in ("lvd1689m", "v2_webli"))
    assert tuple(pretrained_cfg.mean) == statistics
    config = TINY.model_copy(update={"vision": vision})
    features = []
    for only_class_token in ("auto", False):
        torch.manual_seed(0)
        options = {"vision": vision.model_copy(update={"class_token_only": only_class_token})}
        model = build_dual_encoder(config.model_copy(update=options), TOKENIZE).eval()
        with torch.no_grad():
            features.append(model(pixels(image_size), None)[0])
    assert torch.equal(*features)
    assert not torch.allclose(features[0][0], features[0][1], atol=1e-3)
    with pytest.raises(UserError, match="class_token_only=true has no effect"):
        needs_class_token = vision.model_copy(update={"class_token_only": True})
        build_dual_encoder(config.model_copy(update={"vision": needs_class_token}), TOKENIZE)
