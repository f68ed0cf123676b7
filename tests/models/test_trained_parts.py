"""Check which parameters of a dual encoder are trained, and at which learning rates."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from miniatures import save_clip, save_open_clip, save_siglip
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from neuclip_ds.config import Config, LoraConfig, ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.build import build_dual_encoder
from neuclip_ds.models.pretrained.open_clip_models import architecture
from neuclip_ds.models.source import locate_model, model_source
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import (
    add_adapters,
    learning_rate_scales,
    parameter_layers,
)
from neuclip_ds.recipe import parse, validate
from neuclip_ds.section import merge
from neuclip_ds.training.checks import config_warnings

pytestmark = pytest.mark.usefixtures("quick_meta_models")

TREE: dict[str, Any] = {
    "model": {
        "vision": {
            "name": "vit_tiny_patch16_224",
            "image_size": 16,
            "options": {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "proj_drop_rate": 0.5},
        },
        "text": {"width": 16, "layers": 2, "heads": 2, "context_length": 8, "vocab_size": 300},
        "embed_dim": 16,
    }
}
TOKENS: Any = SimpleNamespace(vocab_size=300, bos_id=0, eos_id=1, pad_id=1, context_length=8)


def config_of(**options: Any) -> Config:
    return validate(merge(TREE, options))


def build(**model: Any) -> DualEncoder:
    return build_dual_encoder(config_of(model=model).model, TOKENS)


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_last_blocks_and_what_follows_them_train() -> None:
    names = trained(build(vision={"trainable": 1}, text={"trainable": 0}))
    assert "vision.trunk.blocks.2.attn.qkv.weight" in names
    after_blocks = [name for name in names if not name.startswith("vision.trunk.blocks.2.")]
    assert {name.rpartition(".")[0] for name in after_blocks} == {
        "vision.trunk.norm",
        "vision.projection",
        "text.trunk.final_layer_norm",
        "text.projection",
    }
    with pytest.raises(UserError, match="trainable=4, but the tower has 3 blocks; use at most 3, or all"):
        build(vision={"trainable": 4})


def test_only_the_projection_trains() -> None:
    """The trunk is frozen: it has no dropout, no gradients and no adapters."""
    model = build(vision={"trainable": "projection"}, lora={"rank": 2}).train()
    assert trained(model.vision) == {"projection.weight"}
    assert not any(layer.training for layer in model.vision.trunk.modules())
    assert all("lora" not in name for name, _ in model.vision.named_parameters())
    assert any("lora" in name for name in trained(model.text))
    image, _ = model(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), None)
    image.sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {
        "vision.projection.weight"
    }


@pytest.mark.parametrize("save", [save_clip, save_siglip, save_open_clip])
@pytest.mark.parametrize("tower", ["vision", "text"])
def test_the_projection_of_a_pretrained_tower_trains_if_it_is_separate(
    tmp_path: Path, save: Callable[[Path], Any], tower: str
) -> None:
    save(tmp_path)
    option = f"model.{tower}.trainable"
    config = ModelConfig.model_validate({"pretrained": str(tmp_path), tower: {"trainable": "projection"}})
    source = model_source(config, locate_model(config))
    if save is not save_clip:
        with pytest.raises(UserError, match=f"{option}=projection needs a separate projection .*{option}=0"):
            source.build(source.own_tokenizer() or TOKENS)
        return
    names = trained(source.build(source.own_tokenizer() or TOKENS))
    assert {name for name in names if name.startswith(tower)} == {f"{tower}.projection.weight"}


def test_frozen_towers_give_the_same_features_in_training() -> None:
    """Dropout is off in a frozen tower, and on in a block that is trained."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    image = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    for part, same in (("frozen", True), (1, False)):
        model = build(vision={"trainable": part}).train()
        first, again = (model(image, tokens)[0] for _ in range(2))
        assert torch.equal(first, again) == same
        assert (not trained(model.vision)) == same
        assert not model.vision.trunk.blocks[1].training and model.text.training


def test_batch_norm_of_frozen_parts_keeps_its_statistics() -> None:
    vision = {"name": "resnet18", "image_size": 32, "trainable": 0}
    config = validate({"model": {**TREE["model"], "vision": vision}})
    model = build_dual_encoder(config.model, TOKENS).train()
    before = {name: buffer.clone() for name, buffer in model.vision.named_buffers()}
    model(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), None)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.vision.named_buffers())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapters", [{}, {"rank": 2}], ids=["", "lora"])
def test_gradients_reach_what_trains_and_nothing_else(adapters: dict[str, int], checkpointing: bool) -> None:
    parts = {"vision": {"trainable": 1}, "text": {"trainable": 1}, "lora": adapters}
    model = build(**parts, activation_checkpointing=checkpointing).train()
    randomize_adapters(model)
    image, text = model(*inputs())
    (image.sum() + text.sum()).backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == trained(model) and "vision.trunk.blocks.2.mlp.fc1.weight" in touched
    adapted = {name.partition(".lora_")[0] for name in touched if ".lora_" in name}
    assert bool(adapted) == bool(adapters) and not any(".blocks.2." in name for name in adapted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.vision.trainable=frozen", "model.text.trainable=frozen"], "vision.trainable and text.trainable are"),
        (["model.vision.trainable=some"], "model.vision.trainable: 'some' is not valid; use all, projection"),
        (["model.activation_checkpointing=-1"], "'-1' is not valid; use true, false or a number of blocks"),
        (["model.vision.trainable=-1"], "model.vision.trainable: '-1' is not valid; use all, projection"),
        (["model.lora.rank=4", "model.vision.trainable=all", "model.text.trainable=all"], "has no effect"),
        (["model.lora.rank=4", "model.vision.trainable=projection", "model.text.trainable=all"], "has no effect"),
        (["optimizer.lr=0", "optimizer.text_lr=1e-3"], "lr=0 leaves no schedule"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(["demo", *(f"--{option}" for option in options)])


def test_a_locked_pretrained_tower_has_no_projection_of_its_own() -> None:
    """As in LiT, the new projection of a frozen tower is the identity; otherwise, the projection is trained."""
    locked = build(vision={"trainable": "frozen", "pretrained": "weights"}).vision
    assert torch.equal(locked.projection.weight, torch.eye(16)) and not trained(locked)
    assert not torch.equal(
        build(vision={"trainable": 0, "pretrained": "weights"}).vision.projection.weight, torch.eye(16)
    )
    with pytest.raises(
        UserError, match=r"would freeze the random projection .* set model\.vision\.trainable=projection .*embed_dim=16"
    ):
        build(vision={"trainable": "frozen", "pretrained": "weights"}, embed_dim=8)


def test_frozen_random_weights_are_reported() -> None:
    warnings = config_warnings(config_of(model={"text": {"trainable": "frozen"}}), 1000)
    assert warnings == [
        "model.text.trainable=frozen freezes random weights: set model.pretrained or model.text.pretrained, or train "
        "the tower (model.text.trainable=all)."
    ]
    pretrained = validate({"model": {"text": {"trainable": "frozen"}, "pretrained": "weights"}})
    assert config_warnings(pretrained, 1000) == []


def test_learning_rates_of_towers_and_layers() -> None:
    """The projection has the tower's rate, the last of three blocks has half of it, and the embeddings a sixteenth."""
    config = config_of(optimizer={"lr": 1e-3, "vision_lr": 2e-3, "text_lr": 1e-4, "layer_decay": 0.5})
    model = build()
    scales = learning_rate_scales(model, config.optimizer)
    assert scales.keys() == {name for name, _ in model.named_parameters()}
    locked = build(text={"trainable": "frozen"})
    assert not any(name.startswith("text.") for name in learning_rate_scales(locked, config.optimizer))
    wanted = {
        "vision.projection.weight": 2,
        "vision.trunk.norm.weight": 2,
        "vision.trunk.blocks.2.norm1.weight": 1,
        "vision.trunk.blocks.0.norm1.weight": 0.25,
        "vision.trunk.pos_embed": 0.125,
        "text.projection.weight": 0.1,
    }
    assert {name: scales[name] for name in wanted} == pytest.approx(wanted)
    assert learning_rate_scales(nn.Linear(2, 2), config_of().optimizer) == {}


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 300, "width": 32, "heads": 2, "layers": 3},
}


@dataclass(frozen=True, kw_only=True)
class TowerCase:
    """A tower, its number of blocks, and the names of parameters in some of its layers."""

    build: Callable[[], nn.Module]
    blocks: int
    before: str  # in the first layer, before the blocks
    first: str  # in the first block
    last: str  # in the last block
    after: str  # in the last layer, after the blocks


CASES = {
    "timm's ViT": TowerCase(
        build=lambda: timm.create_model("vit_base_patch32_clip_224", num_classes=0, depth=11),
        blocks=11,
        before="norm_pre.weight",
        first="blocks.0.norm1.weight",
        last="blocks.10.mlp.fc2.bias",
        after="norm.weight",
    ),
    "timm's ConvNeXt": TowerCase(
        build=lambda: timm.create_model("convnext_atto", num_classes=0),
        blocks=4,
        before="stem.0.weight",
        first="stages.0.blocks.0.conv_dw.weight",
        last="stages.3.blocks.1.mlp.fc2.bias",
        after="head.norm.bias",
    ),
    "CLIP's text tower": TowerCase(
        build=lambda: CLIPTextModel(CLIPTextConfig(**SMALL)),
        blocks=3,
        before="embeddings.position_embedding.weight",
        first="encoder.layers.0.self_attn.k_proj.weight",
        last="encoder.layers.2.layer_norm2.bias",
        after="final_layer_norm.weight",
    ),
    "open_clip's image tower": TowerCase(
        build=lambda: architecture(OPEN_CLIP, "").visual,
        blocks=2,
        before="positional_embedding",
        first="transformer.resblocks.0.ln_1.weight",
        last="transformer.resblocks.1.mlp.c_proj.bias",
        after="proj",
    ),
    "open_clip's text tower": TowerCase(
        build=lambda: architecture(OPEN_CLIP, "").text,
        blocks=3,
        before="positional_embedding",
        first="transformer.resblocks.0.ln_1.weight",
        last="transformer.resblocks.2.mlp.c_proj.bias",
        after="text_projection",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_in_the_layer_where_it_is_used(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        tower = case.build()
    layers = parameter_layers(tower, "vision")
    assert len(layers) == case.blocks + 2
    assert case.before in layers[0]
    assert case.first in layers[1]
    assert case.last in layers[-2]
    assert case.after in layers[-1]
    assert sorted(name for layer in layers for name in layer) == sorted(name for name, _ in tower.named_parameters())


def test_a_resnet_has_no_parameters_after_its_blocks_and_a_tower_without_blocks_is_refused() -> None:
    with torch.device("meta"):
        layers = parameter_layers(timm.create_model("resnet18", num_classes=0), "vision")
    assert len(layers) == 10 and "layer4.1.bn2.bias" in layers[-2] and layers[-1] == []
    with pytest.raises(UserError, match=r"The text tower has no list of blocks, .*: set model\.text\.trainable"):
        parameter_layers(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), "text")


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), torch.randint(2, 300, (2, 8))


def randomize_adapters(model: nn.Module) -> None:
    """Draw the adapters' B weights, which are initially zero, at random so that the adapters take effect."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter)


def test_adapters_change_nothing_at_first_and_alone_train() -> None:
    torch.manual_seed(0)
    plain = build().eval()
    image, tokens = inputs()
    torch.manual_seed(0)
    model = build(lora={"rank": 2}).eval()
    assert torch.equal(plain(image, tokens)[0], model(image, tokens)[0])
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert trained["vision.trunk.blocks.0.attn.qkv.lora_A.default.weight"] == (2, 16)
    assert trained["text.trunk.encoder.layers.1.mlp.fc1.lora_B.default.weight"] == (64, 2)
    ends = {name.partition(".lora_")[0].split(".", 4)[-1] for name in trained if name.startswith("vision.")}
    assert ends == {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
    model = build(text={"trainable": "all"}, lora={"rank": 2})
    assert all(parameter.requires_grad and "lora" not in name for name, parameter in model.text.named_parameters())


def test_attention_of_torch_gets_no_adapters() -> None:
    """peft would replace the attention's parameters in every forward pass, but DeepSpeed has partitioned them."""
    tower = architecture(OPEN_CLIP, "").visual.requires_grad_(False)
    add_adapters({"vision": tower}, LoraConfig(rank=2))
    assert sum(".lora_A." in name for name, _ in tower.named_parameters()) == 4
    with pytest.raises(UserError, match="No tower has blocks with frozen linear layers"):
        add_adapters({"vision": nn.Linear(2, 2).requires_grad_(False)}, LoraConfig(rank=2))
