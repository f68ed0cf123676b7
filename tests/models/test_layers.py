"""Layers of towers of every library, in their order."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from neuclip_ds.errors import UserError
from neuclip_ds.models.layers import parameter_layers
from neuclip_ds.models.pretrained.open_clip_models import architecture

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 300, "width": 32, "heads": 2, "layers": 3},
}
# build -> number of blocks, a parameter before the first, of the first and of the last, those after all blocks
CASES = {
    "timm's ViT": (
        lambda: timm.create_model("vit_base_patch32_clip_224", num_classes=0, depth=11),
        (11, "norm_pre.weight", "blocks.0.norm1.weight", "blocks.10.mlp.fc2.bias", {"norm.weight", "norm.bias"}),
    ),
    "timm's ResNet": (
        lambda: timm.create_model("resnet18", num_classes=0),
        (8, "conv1.weight", "layer1.0.conv1.weight", "layer4.1.bn2.bias", set()),
    ),
    "timm's ConvNeXt": (
        lambda: timm.create_model("convnext_atto", num_classes=0),
        (
            4,
            "stem.0.weight",
            "stages.0.blocks.0.conv_dw.weight",
            "stages.3.blocks.1.mlp.fc2.bias",
            {"head.norm.weight", "head.norm.bias"},
        ),
    ),
    "CLIP's text tower": (
        lambda: CLIPTextModel(CLIPTextConfig(**SMALL)),
        (
            3,
            "embeddings.position_embedding.weight",
            "encoder.layers.0.self_attn.k_proj.weight",
            "encoder.layers.2.layer_norm2.bias",
            {"final_layer_norm.weight", "final_layer_norm.bias"},
        ),
    ),
    "CLIP's image tower": (
        lambda: CLIPVisionModel(CLIPVisionConfig(**SMALL)),
        (
            3,
            "pre_layrnorm.weight",
            "encoder.layers.0.self_attn.k_proj.weight",
            "encoder.layers.2.layer_norm2.bias",
            {"post_layernorm.weight", "post_layernorm.bias"},
        ),
    ),
    "SigLIP's image tower": (
        lambda: SiglipVisionModel(SiglipVisionConfig(**SMALL)),
        (
            3,
            "embeddings.patch_embedding.weight",
            "encoder.layers.0.layer_norm1.weight",
            "encoder.layers.2.mlp.fc2.bias",
            {"head.probe", "post_layernorm.weight"},
        ),
    ),
    "BERT": (
        lambda: BertModel(BertConfig(**SMALL)),
        (
            3,
            "embeddings.LayerNorm.bias",
            "encoder.layer.0.attention.self.query.weight",
            "encoder.layer.2.output.LayerNorm.bias",
            {"pooler.dense.weight", "pooler.dense.bias"},
        ),
    ),
    "open_clip's image tower": (
        lambda: architecture(OPEN_CLIP, "").visual,
        (
            2,
            "positional_embedding",
            "transformer.resblocks.0.ln_1.weight",
            "transformer.resblocks.1.mlp.c_proj.bias",
            {"proj", "ln_post.weight", "ln_post.bias"},
        ),
    ),
    "open_clip's text tower": (
        lambda: architecture(OPEN_CLIP, "").text,
        (
            3,
            "positional_embedding",
            "transformer.resblocks.0.ln_1.weight",
            "transformer.resblocks.2.mlp.c_proj.bias",
            {"text_projection", "ln_final.weight", "ln_final.bias"},
        ),
    ),
}


@pytest.mark.usefixtures("quick_meta_models")
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_in_the_layer_where_it_is_used(case: str) -> None:
    build, (blocks, before, first, last, after) = CASES[case]
    with torch.device("meta"):
        tower = build()
    layers = parameter_layers(tower, "vision")
    assert len(layers) == blocks + 2
    assert before in layers[0] and first in layers[1] and last in layers[-2] and after <= set(layers[-1])
    assert len(layers[-1]) == len(after) or case.startswith("SigLIP")
    assert sorted(name for layer in layers for name in layer) == sorted(name for name, _ in tower.named_parameters())


def test_a_tower_without_blocks_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"The text tower has no list of blocks to count: set model\.text\.train to all"
    ):
        parameter_layers(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), "text")
