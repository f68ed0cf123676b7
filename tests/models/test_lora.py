"""LoRA adapters of peft in towers of every library, and their merge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from neuclip_ds.config import LoraConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder
from neuclip_ds.models.lora import add_adapters, merge_adapters
from neuclip_ds.models.pretrained.open_clip_models import architecture
from neuclip_ds.recipe import parse, validate
from neuclip_ds.section import merge

TREE: dict[str, Any] = {
    "vision": {
        "name": "vit_base_patch32_clip_224",
        "image_size": 16,
        "options": {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2},
    },
    "text": {"width": 16, "layers": 2, "heads": 2, "context_length": 8, "vocab_size": 300},
    "embed_dim": 16,
}
TOKENS: Any = SimpleNamespace(vocab_size=300, bos_id=0, eos_id=1, pad_id=1, context_length=8)


def build(**options: Any) -> DualEncoder:
    return build_dual_encoder(validate({"model": merge(TREE, options)}).model, TOKENS)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), torch.randint(2, 300, (2, 8))


def draw(model: nn.Module) -> None:
    """Give the adapters weights, as training does: at first they change nothing."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter)


def test_adapters_change_nothing_at_first_and_alone_train() -> None:
    torch.manual_seed(0)
    wanted = build()(*inputs())[0]
    torch.manual_seed(0)
    model = build(vision={"lora": {"rank": 2}}, text={"lora": {"rank": 3, "targets": ["q_proj", "mlp.fc1"]}})
    torch.manual_seed(0)
    plain = build()
    given = inputs()
    assert wanted.shape == model(*given)[0].shape
    assert torch.equal(plain(*given)[0], model(*given)[0])
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert trained["vision.trunk.blocks.0.attn.qkv.lora_A.default.weight"] == (2, 16)
    assert trained["text.trunk.encoder.layers.1.mlp.fc1.lora_B.default.weight"] == (64, 3)
    ends = {name.partition(".lora_")[0].split(".", 3)[-1] for name in trained if name.startswith("vision.")}
    assert {end.partition(".")[2] for end in ends} == {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
    assert sum("text" in name for name in trained) == 2 * 2 * 2


def test_adapters_under_blocks_that_train_in_full() -> None:
    model = build(vision={"train": 1, "lora": {"rank": 2}}, activation_checkpointing=True).train()
    draw(model)
    model(*inputs())[0].sum().backward()
    touched = {name for name, parameter in model.vision.named_parameters() if parameter.grad is not None}
    assert touched == {name for name, parameter in model.vision.named_parameters() if parameter.requires_grad}
    assert "trunk.blocks.2.attn.qkv.weight" in touched and "projection.weight" in touched
    assert "trunk.blocks.0.attn.qkv.lora_A.default.weight" in touched
    assert not any("lora" in name for name in touched if ".blocks.2." in name)


def test_dropout_of_adapters_is_off_in_evaluation() -> None:
    model = build(vision={"lora": {"rank": 2, "dropout": 0.5}})
    draw(model)
    given = inputs()
    for training in (True, False):
        first, again = (model.train(training)(*given)[0] for _ in range(2))
        assert torch.equal(first, again) != training


def test_merged_weights_compute_the_same_under_the_plain_names() -> None:
    model = build(vision={"lora": {"rank": 2, "alpha": 3}}, text={"lora": {"rank": 2}}).eval()
    draw(model)
    given = inputs()
    wanted = model(*given)
    merge_adapters(model)
    plain = build().eval()
    plain.load_state_dict(model.state_dict())
    for found, side in zip(plain(*given), wanted, strict=True):
        torch.testing.assert_close(found, side, rtol=0, atol=1e-6)


def test_adapters_are_those_of_peft() -> None:
    """The same layer by peft's own interface, with the same adapter."""
    torch.manual_seed(0)
    tower = CLIPTextModel(
        CLIPTextConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    other = CLIPTextModel(tower.config)
    other.load_state_dict(tower.state_dict())
    tower.requires_grad_(False)
    add_adapters(tower, LoraConfig(rank=4, alpha=8, targets=["q_proj"]), "text")
    wrapped = peft.get_peft_model(other, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])).base_model.model
    draw(tower)
    wrapped.load_state_dict(tower.state_dict())
    tokens = torch.randint(2, 300, (2, 8))
    assert torch.equal(tower(tokens).last_hidden_state, wrapped(tokens).last_hidden_state)


def test_attention_of_torch_gets_no_adapters() -> None:
    """peft would replace its parameters in every forward pass, which DeepSpeed has partitioned."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 8, "vocab_size": 300, "width": 32, "heads": 2, "layers": 2},
    }
    tower = architecture(config, "").visual.requires_grad_(False)
    with pytest.raises(UserError, match=r"no out_proj for adapters .*lora\.targets.*end in: c_fc, c_proj"):
        add_adapters(tower, LoraConfig(rank=2, targets=["out_proj"]), "vision")
    add_adapters(tower, LoraConfig(rank=2), "vision")
    assert sum(".lora_A." in name for name, _ in tower.named_parameters()) == 4


def test_a_target_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"The vision tower has no q_proj for adapters .* end in: qkv, proj, fc1, fc2"):
        build(vision={"lora": {"rank": 2, "targets": ["q_proj"]}})


def test_adapters_on_weights_that_train_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.text: train=all leaves no frozen weights for lora"):
        parse(["demo", "--model.text.lora.rank=4", "--model.text.train=all"])


@pytest.mark.usefixtures("quick_meta_models")
def test_adapters_take_no_memory_in_a_plan() -> None:
    with torch.device("meta"):
        model = build(vision={"lora": {"rank": 2}})
    assert all(parameter.is_meta for parameter in model.parameters())
