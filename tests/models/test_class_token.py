"""Computing only the class token in the last image block gives the features and gradients of the whole block."""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, CLIPVisionModel, MetaClip2VisionConfig, MetaClip2VisionModel

from neuclip_ds.config import ModelConfig, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.class_token import compute_class_token_only
from neuclip_ds.models.image_models import new_vision_tower
from neuclip_ds.models.pretrained.open_clip_models import import_open_clip
from neuclip_ds.models.towers import VisionTower
from neuclip_ds.models.trained_parts import merge_adapters
from neuclip_ds.section import merge

pytestmark = pytest.mark.usefixtures("quick_meta_models")

TREE: dict[str, Any] = {
    "vision": {
        "name": "vit_tiny_patch16_224",
        "image_size": 32,
        "options": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "text": {"width": 32, "layers": 1, "heads": 2, "context_length": 8, "vocab_size": 300},
    "embed_dim": 16,
}
TOKENS: Any = SimpleNamespace(vocab_size=300, bos_id=0, eos_id=1, pad_id=1, context_length=8)
PIXELS = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def built(class_token_only: Any, options: Mapping[str, Any] = {}) -> VisionTower:
    """Build an image tower in training mode, with adapters that change its features."""
    config = ModelConfig.model_validate(merge(merge(TREE, options), {"vision": {"class_token_only": class_token_only}}))
    torch.manual_seed(0)
    tower = build_dual_encoder(config, TOKENS).vision
    for name, parameter in tower.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return tower.train()


def run(tower: VisionTower) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the features and the gradients by parameter name; dropout masks and dropped paths have a fixed seed."""
    torch.manual_seed(1)
    features = tower(PIXELS)
    (features * torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)).sum().backward()
    return features.detach(), {name: parameter.grad for name, parameter in tower.named_parameters()}


def assert_same(tower: VisionTower, expected_tower: VisionTower) -> None:
    features, gradients = run(tower.double())
    expected, expected_gradients = run(expected_tower.double())
    torch.testing.assert_close(features, expected, rtol=1e-12, atol=1e-12)
    assert list(tower.state_dict()) == list(expected_tower.state_dict())
    for name, gradient in gradients.items():
        wanted = expected_gradients[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12, msg=name)


TIMM_VARIANTS = {"init_values": 0.5, "drop_path_rate": 0.5, "qk_norm": True, "scale_attn_norm": True, "reg_tokens": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patch_drop": {"vision": {"patch_drop": 0.5}},
    "checkpointing": {"activation_checkpointing": True},
    "adapters": {"lora": {"rank": 2}},
    "adapters on all but the last block": {"lora": {"rank": 2}, "vision": {"trainable": 1}},
    "frozen blocks": {"vision": {"trainable": 0}},
    "no qkv bias": {"vision": {"options": {"qkv_bias": False}}},
    "timm's options": {"vision": {"options": TIMM_VARIANTS}},
    "CLIP's norm before the blocks": {"vision": {"name": "vit_base_patch16_clip_224"}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_features_and_gradients_equal_those_of_the_whole_block(name: str) -> None:
    tower = built("auto", OPTIONS[name])
    assert_same(tower, built(False, OPTIONS[name]))
    if "lora" in OPTIONS[name]:
        with torch.no_grad():
            expected = tower(PIXELS)
            merge_adapters(tower)
            torch.testing.assert_close(tower(PIXELS), expected)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def library_trunk(name: str) -> Any:
    torch.manual_seed(0)
    if name == "open_clip":
        transformer = import_open_clip().transformer
        return transformer.VisionTransformer(32, 8, width=32, layers=2, heads=2, mlp_ratio=2.0, output_dim=16)
    if name == "open_clip with timm":
        timm_model = import_open_clip().timm_model.TimmModel
        return timm_model("test_vit", embed_dim=16, image_size=160, pool="token", proj="linear")
    classes = {"clip": (CLIPVisionConfig, CLIPVisionModel), "metaclip_2": (MetaClip2VisionConfig, MetaClip2VisionModel)}
    config_class, model_class = classes[name]
    return model_class(config_class(**SIZES, image_size=32, patch_size=8, attn_implementation="sdpa"))


@pytest.mark.parametrize("name", ["clip", "metaclip_2", "open_clip", "open_clip with timm"])
def test_trunks_of_other_libraries_are_covered(name: str) -> None:
    towers = []
    for option in (True, False):
        tower = VisionTower(library_trunk(name), None, [0.5] * 3, [0.25] * 3)
        compute_class_token_only(tower, option)
        towers.append(tower.train())
    if name == "open_clip with timm":
        for tower in towers:
            tower.trunk.trunk.set_input_size((32, 32))
    with FlopCounterMode(display=False) as only:
        towers[0](PIXELS)
    with FlopCounterMode(display=False) as both:
        towers[1](PIXELS)
    assert only.get_total_flops() < both.get_total_flops()
    assert_same(*towers)


@pytest.mark.parametrize("name", ["clip", "metaclip_2"])
def test_a_trunk_of_transformers_that_is_called_alone_returns_all_tokens(name: str) -> None:
    tower = VisionTower(library_trunk(name), None, [0.5] * 3, [0.25] * 3).eval()
    pixels = tower.normalize(PIXELS)
    expected = tower.trunk(pixels).last_hidden_state
    compute_class_token_only(tower, True)
    tower(PIXELS)
    torch.testing.assert_close(tower.trunk(pixels).last_hidden_state, expected)


@pytest.mark.parametrize("copied", [False, True])
def test_a_trunk_of_timm_that_is_called_alone_returns_all_tokens(copied: bool) -> None:
    expected = built(False).eval()
    tower = built(True).eval()
    if copied:
        tower = copy.deepcopy(tower)
    tokens_of_block = []
    tower.trunk.blocks[-1].register_forward_hook(lambda block, args, output: tokens_of_block.append(output.shape[1]))
    pixels = tower.normalize(PIXELS)
    tower(PIXELS)
    torch.testing.assert_close(tower.trunk.forward_features(pixels), expected.trunk.forward_features(pixels))
    assert tokens_of_block == [1, 17]


def test_bf16_features_are_as_exact_as_those_of_the_whole_block() -> None:
    exact, _ = run(built(False).double())
    errors = []
    for option in (True, False):
        features, _ = run(built(option).bfloat16())
        errors.append((features - exact).norm())
    assert errors[0] < 2 * errors[1]


def forward_flops(option: Any) -> float:
    """Return the operations of a ViT-B/16 on one image on a device that is not a CPU."""
    with torch.device("meta"):
        tower = new_vision_tower(VisionConfig(name="vit_base_patch16_clip_224"), 512)
        compute_class_token_only(tower, option)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(torch.empty(1, 3, 224, 224, dtype=torch.uint8))
    return float(counter.get_total_flops())


def test_operations_of_a_vit_b16() -> None:
    """By default, other devices than CPUs compute all tokens."""
    assert 3 * forward_flops(True) == pytest.approx(98.2e9, rel=0.01)
    assert forward_flops("auto") == forward_flops(False)


AVERAGED = VisionConfig.model_validate(merge(TREE["vision"], {"options": {"global_pool": "avg"}}))
SIGLIP = VisionConfig.model_validate(merge(TREE["vision"], {"name": "vit_base_patch16_siglip_224"}))
RESNET = VisionConfig(name="resnet18", image_size=32, options={"layers": [1, 1, 1, 1]})


@pytest.mark.parametrize("config", [AVERAGED, SIGLIP, RESNET], ids=["average", "siglip", "resnet"])
def test_towers_that_do_not_pool_at_a_class_token_refuse_the_option(config: VisionConfig) -> None:
    with torch.device("meta"):
        tower = new_vision_tower(config, 16)
    compute_class_token_only(tower, "auto")
    with pytest.raises(UserError, match="class_token_only=true has no effect"):
        compute_class_token_only(tower, True)
