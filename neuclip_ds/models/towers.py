"""The two towers, each with a bias-free projection to the joint space."""

from __future__ import annotations

import difflib
from typing import Any

import timm
import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from neuclip_ds.config import TextConfig, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.tokenizer import CaptionTokenizer


class VisionTower(nn.Module):
    """A timm model without its classifier, and a projection.

    Pixels are normalised here, on the device and in float32. Mean and deviation are plain numbers, because DeepSpeed
    casts buffers to bf16.
    """

    def __init__(self, config: VisionConfig, embed_dim: int) -> None:
        super().__init__()
        self._mean, self._std = config.mean, config.std
        backbone: Any = _timm_model(config)  # timm's models share attributes that no type describes
        self.backbone = backbone
        self.projection = _projection(backbone.num_features, embed_dim)

    def forward(self, image: Tensor) -> Tensor:
        """(b, 3, H, W) uint8 -> (b, embed_dim) in the weights' dtype."""
        shape = (1, 3, 1, 1)
        mean = torch.tensor(self._mean, device=image.device).view(shape)
        std = torch.tensor(self._std, device=image.device).view(shape)
        pixels = (image.float() / 255 - mean) / std
        return self.projection(self.backbone(pixels.to(self.projection.weight.dtype)))

    def checkpoint_activations(self) -> None:
        """Recompute block activations in the backward pass."""
        self.backbone.set_grad_checkpointing(True)


class TextTower(nn.Module):
    """CLIP's text transformer, pooled at the first end-of-text token, and a projection."""

    def __init__(self, config: TextConfig, tokenizer: CaptionTokenizer, embed_dim: int) -> None:
        super().__init__()
        self.transformer = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=max(tokenizer.vocab_size, config.vocab_size if config.tokenizer is None else 0),
                hidden_size=config.width,
                intermediate_size=4 * config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=config.context_length,
                bos_token_id=tokenizer.bos_id,
                eos_token_id=tokenizer.eos_id,
                pad_token_id=tokenizer.pad_id,
                attn_implementation="sdpa",
            )
        )
        self.projection = _projection(config.width, embed_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, T) int64 -> (b, embed_dim) in the weights' dtype."""
        return self.projection(self.transformer(input_ids=tokens).pooler_output)

    def checkpoint_activations(self) -> None:
        """Recompute layer activations in the backward pass."""
        self.transformer.gradient_checkpointing_enable({"use_reentrant": False})


def _timm_model(config: VisionConfig) -> nn.Module:
    if not timm.is_model(config.name):
        nearest = difflib.get_close_matches(config.name, timm.list_models(), n=3)
        raise UserError(f"model.vision.name={config.name} is no timm model; the nearest are {', '.join(nearest)}.")
    options: dict[str, Any] = dict(config.options)
    _check_size(config)
    attempts = [{"img_size": config.image_size, **options}, options]  # plain CNNs take images of any size
    for attempt in attempts:
        try:
            return timm.create_model(config.name, num_classes=0, **attempt)
        except TypeError as error:
            problem = str(error)
        except (ValueError, AssertionError, RuntimeError) as error:
            raise UserError(f"timm cannot build {config.name} with {attempt}: {error}; mend model.vision.") from error
    raise UserError(f"timm cannot build {config.name} with {options}: {problem}; mend model.vision.options.")


def _check_size(config: VisionConfig) -> None:
    """Refuses sizes that timm would cut silently."""
    size, patch = config.image_size, config.options.get("patch_size")
    if patch is None and "_patch" in config.name:
        digits = config.name.split("_patch")[1].split("_")[0]
        patch = int(digits) if digits.isdigit() else None
    if isinstance(patch, int) and (size % patch or size < patch):
        below = max(patch, size // patch * patch)
        raise UserError(
            f"model.vision.image_size={size} is not a multiple of the patch size {patch} of {config.name}; "
            f"use {below} or {below + patch}, or another model.vision.options.patch_size."
        )
    if patch is None and size < 32:
        raise UserError(
            f"model.vision.image_size={size} is too small for {config.name}, which needs 32 pixels or more."
        )


def _projection(width: int, embed_dim: int) -> nn.Linear:
    layer = nn.Linear(width, embed_dim, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer
