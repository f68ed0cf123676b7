"""Build the dual encoder that a config describes, and apply the options common to all models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from neuclip_ds.config import ModelConfig, TextConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.class_token import compute_class_token_only
from neuclip_ds.models.image_models import new_vision_tower
from neuclip_ds.models.packing import pack_clip_text
from neuclip_ds.models.recompute import checkpoint_activations
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.models.towers import DualEncoder, TextTower, new_projection
from neuclip_ds.models.trained_parts import TOWERS, add_adapters, check_separate_projection, freeze, lock_projection


def build_dual_encoder(
    config: ModelConfig,
    tokenizer: CaptionTokenizer | None,
    image_weights: Mapping[str, Tensor] | None = None,
    text: TextTower | None = None,
) -> DualEncoder:
    """Build the dual encoder that a config describes; random weights depend only on torch's seed.

    A new text tower uses OpenAI's quick GELU if the image model is one of timm's `quickgelu` variants, and GELU
    otherwise, as in open_clip's configs.

    Args:
        config: the model config, which describes both towers.
        tokenizer: the tokenizer of a new text tower; unused, and may be None, if `text` is given.
        image_weights: initial weights of the image tower; random by default.
        text: the text tower of `model.text.pretrained`; by default, CLIP's text transformer with random weights.

    Raises:
        UserError: a tower cannot be built, `trainable=frozen` would freeze a random projection, or as in
            `apply_common_options`.
    """
    vision = new_vision_tower(config.vision, config.embed_dim, image_weights)
    if text is None:
        assert tokenizer is not None
        activation = "quick_gelu" if "quickgelu" in config.vision.name else "gelu"
        text = new_text_tower(config.text, tokenizer, config.embed_dim, activation)
    model = DualEncoder(vision, text)
    if not config.pretrained:  # otherwise, the projections come from an earlier run
        if config.vision.pretrained and config.trained("vision") == "frozen":
            lock_projection(vision, "vision")
        if config.text.pretrained and config.trained("text") == "frozen":
            lock_projection(text, "text")
    return apply_common_options(model, config)


def apply_common_options(model: DualEncoder, config: ModelConfig) -> DualEncoder:
    """Apply, in place, the options that are common to all models.

    These are `vision.class_token_only`, `text.packed`, activation checkpointing, dropout on the projections' inputs,
    freezing and LoRA adapters.

    Raises:
        UserError: a tower does not support an option, or LoRA is enabled and peft is not installed.
    """
    compute_class_token_only(model.vision, config.vision.class_token_only)
    if config.text.packed is True and model.text.pack is None:
        raise UserError(
            "model.text.packed=true needs a text transformer of CLIP, MetaCLIP 2 or open_clip that is causal, is "
            f"pooled at EOS and has no attention dropout; {type(model.text.trunk).__name__} needs padded captions: "
            "omit model.text.packed."
        )
    model.text.packed = config.text.packed
    for name in TOWERS:
        checkpoint_activations(model.get_submodule(name), name, config.activation_checkpointing)
    if config.projection_dropout:
        for tower in (model.vision, model.text):
            check_separate_projection(tower, "model.projection_dropout", "omit the option")
            tower.projection_dropout = config.projection_dropout
    freeze(model, config)
    if config.lora.rank:
        add_configured_adapters(model, config)
    return model


def add_configured_adapters(model: DualEncoder, config: ModelConfig) -> None:
    """Add LoRA adapters in place, except to towers with `trainable` all or projection.

    Raises UserError if peft is not installed or the other towers have no blocks with frozen linear layers.
    """
    adapted = [name for name in TOWERS if config.trained(name) not in ("all", "projection")]
    add_adapters({name: model.get_submodule(name) for name in adapted}, config.lora)


def new_text_tower(
    config: TextConfig, tokenizer: CaptionTokenizer, embed_dim: int, activation: str = "gelu"
) -> TextTower:
    """Build CLIP's causal text transformer, which pools its output at the first EOS token.

    Args:
        config: the config of the text tower.
        tokenizer: the caption tokenizer, with a context length of at most that of `config`.
        embed_dim: width of the joint embedding space.
        activation: activation function of the MLPs; `quick_gelu` is OpenAI's x sigmoid(1.702 x).
    """
    trunk_config = CLIPTextConfig(
        vocab_size=config.vocab_size if config.tokenizer is None else tokenizer.vocab_size,
        hidden_size=config.width,
        intermediate_size=4 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.resolved_context_length(),
        hidden_act=activation,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        attn_implementation="sdpa",
    )
    trunk = CLIPTextModel(trunk_config)
    _init_attention(trunk)
    # TextTower pools, because with EOS id 2 the trunk would pool at the largest id (to support old checkpoints)
    pack = pack_clip_text(trunk, tokenizer.eos_id)
    projection = new_projection(config.width, embed_dim, config.projection)
    return TextTower(trunk, projection, tokenizer.eos_id, pack)


@torch.no_grad()
def _init_attention(model: Any) -> None:
    """Initialize attention as in CLIP: std width^-1/2 for q, k and v, and (2 * layers * width)^-1/2 for the output.

    The transformers library swaps the two values, unlike OpenAI's code and open_clip.
    """
    input_std = model.config.hidden_size**-0.5
    output_std = input_std * (2 * model.config.num_hidden_layers) ** -0.5
    for layer in model.encoder.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.normal_(projection.weight, std=input_std)
        nn.init.normal_(attention.out_proj.weight, std=output_std)
