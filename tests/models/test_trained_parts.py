"""What trains of a dual encoder, and at which learning rate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from neuclip_ds.config import Config
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder
from neuclip_ds.models.trained_parts import Trainable, learning_rate_scales
from neuclip_ds.recipe import parse, validate
from neuclip_ds.section import merge
from neuclip_ds.training.checks import likely_slips

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
    found = trained(build(vision={"train": 1}, text={"train": 0}))
    assert {name.rpartition(".")[0] for name in found if not name.startswith("vision.trunk.blocks.2.")} == {
        "vision.trunk.norm",
        "vision.projection",
        "text.trunk.final_layer_norm",
        "text.projection",
    }
    assert "vision.trunk.blocks.2.attn.qkv.weight" in found


def test_frozen_towers_give_the_same_features_in_training() -> None:
    """Their dropout is off; that of a block that trains is on."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    image = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    for part, same in (("frozen", True), (1, False)):
        model = build(vision={"train": part}).train()
        first, again = (model(image, tokens)[0] for _ in range(2))
        assert torch.equal(first, again) == same
        assert model.vision.frozen == same
        assert not model.vision.trunk.blocks[1].training and model.text.training


def test_batch_norm_of_frozen_parts_keeps_its_statistics() -> None:
    vision = {"name": "resnet18", "image_size": 32, "train": 0}
    config = validate({"model": {**TREE["model"], "vision": vision}})
    model = build_dual_encoder(config.model, TOKENS).train()
    before = {name: buffer.clone() for name, buffer in model.vision.named_buffers()}
    model(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), None)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.vision.named_buffers())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_what_trains_and_nothing_else(checkpointing: bool) -> None:
    model = build(vision={"train": 2}, text={"train": 1}, activation_checkpointing=checkpointing).train()
    image, text = model(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.int64))
    (image.sum() + text.sum()).backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained(model)


def test_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vision\.train=4, but the tower has 3 blocks; use at most 3, or all"):
        build(vision={"train": 4})


def test_a_run_in_which_nothing_trains_is_refused() -> None:
    with pytest.raises(UserError, match=r"vision\.train and text\.train are both frozen"):
        parse(["demo", "--model.vision.train=frozen", "--model.text.train=frozen"])


@pytest.mark.parametrize("value", ["some", "-1", "1.5"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(UserError, match=rf"model\.vision\.train: '{value}' is neither all nor frozen"):
        parse(["demo", f"--model.vision.train={value}"])


def test_a_locked_pretrained_tower_has_no_projection_of_its_own() -> None:
    """LiT: a new projection is the identity where the tower is frozen, and trained elsewhere."""
    locked = build(vision={"train": "frozen", "pretrained": "weights"}).vision
    assert torch.equal(locked.projection.weight, torch.eye(16)) and locked.frozen
    assert not torch.equal(build(vision={"train": 0, "pretrained": "weights"}).vision.projection.weight, torch.eye(16))
    with pytest.raises(
        UserError, match=r"would freeze the random projection .* set model\.vision\.train=0 .*embed_dim=16"
    ):
        build(vision={"train": "frozen", "pretrained": "weights"}, embed_dim=8)


def test_frozen_random_weights_are_reported() -> None:
    slips = likely_slips(config_of(model={"text": {"train": "frozen"}}), [])
    assert slips == ["model.text.train=frozen freezes random weights: name weights with model.text.pretrained."]
    assert likely_slips(config_of(model={"text": {"train": "frozen"}, "pretrained": "weights"}), []) == []


def test_numbers_of_parameters() -> None:
    model = build(text={"train": "frozen"})
    text = sum(parameter.numel() for parameter in model.text.parameters())
    assert Trainable.of(model) == Trainable(sum(p.numel() for p in model.vision.parameters()), text)


def test_learning_rates_of_towers_and_layers() -> None:
    """The projection has the tower's rate, the last of three blocks half of it, the embeddings a sixteenth."""
    config = config_of(optimizer={"lr": 1e-3, "vision": {"lr": 2e-3, "layer_decay": 0.5}, "text": {"lr": 1e-4}})
    model = build()
    scales = learning_rate_scales(model, config.optimizer)
    assert scales.keys() == {name for name, _ in model.named_parameters()}
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


def test_the_rule_for_batches_scales_the_rates_of_towers() -> None:
    tree = {"optimizer": {"lr": 1e-3, "base_batch_size": 64, "text": {"lr": 1e-4}}, "data": {"batch_size": 256}}
    found = config_of(**tree).with_scaled_rates().optimizer
    assert (found.lr, found.text.lr, found.vision.lr) == (pytest.approx(4e-3), pytest.approx(4e-4), None)


def test_a_rate_of_a_tower_needs_a_schedule() -> None:
    with pytest.raises(UserError, match=r"lr=0 leaves no schedule"):
        parse(["demo", "--optimizer.lr=0", "--optimizer.text.lr=1e-3"])
