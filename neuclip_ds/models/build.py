"""Build the dual encoder of a config, and apply the options that every model has."""

from collections.abc import Mapping

from torch import Tensor

from neuclip_ds.config import ModelConfig
from neuclip_ds.models.image_models import new_vision_tower
from neuclip_ds.models.recompute import checkpoint_activations
from neuclip_ds.models.text_models import new_text_tower
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trained_parts import TOWERS, add_adapters, freeze, lock_projection


def build_dual_encoder(
    config: ModelConfig, tokenizer: CaptionTokenizer, image_weights: Mapping[str, Tensor] | None = None
) -> DualEncoder:
    """Build the dual encoder of a config; random weights depend on torch's seed only.

    Both towers use OpenAI's quick GELU if the image model is one of timm's `quickgelu` variants, else GELU, as in
    open_clip's configs.

    Args:
        config: config of the towers.
        tokenizer: tokenizer of the text tower.
        image_weights: initial weights of the image tower; random by default.

    Raises:
        UserError: the towers cannot be built, or do not support an option of the config.
    """
    vision = new_vision_tower(config.vision, config.embed_dim, image_weights)
    activation = "quick_gelu" if "quickgelu" in config.vision.name else "gelu"
    text = new_text_tower(config.text, tokenizer, config.embed_dim, activation)
    if config.vision.pretrained and config.trained("vision") == "frozen":
        lock_projection(vision)
    return prepare(DualEncoder(vision, text), config)


def prepare(model: DualEncoder, config: ModelConfig) -> DualEncoder:
    """Apply the options that every model has, in place: activation checkpointing, freezing, LoRA adapters."""
    for name in TOWERS:
        checkpoint_activations(model.get_submodule(name), name, config.activation_checkpointing)
    freeze(model, config)
    if config.lora.rank:
        add_adapters({name: model.get_submodule(name) for name in TOWERS if config.trained(name) != "all"}, config.lora)
    return model
