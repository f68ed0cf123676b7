"""Image and text tower side by side: what the DeepSpeed engine wraps."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import normalize

from neuclip_ds.config import ModelConfig
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.models.towers import TextTower, VisionTower


class DualEncoder(nn.Module):
    """Two towers into one space. Normalisation is done in float32, whatever the weights' precision."""

    def __init__(self, vision: VisionTower, text: TextTower) -> None:
        super().__init__()
        self.vision = vision
        self.text = text

    def forward(self, image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(b, 3, H, W) uint8 and (b, T) int64 -> (b, d) float32 unit rows of each; None for an absent side."""
        text_features = None if tokens is None else normalize(self.text(tokens).float(), dim=1)
        image_features = None if image is None else normalize(self.vision(image).float(), dim=1)
        return image_features, text_features


def build_dual_encoder(config: ModelConfig, tokenizer: CaptionTokenizer) -> DualEncoder:
    """The model that the config describes, with fresh weights drawn from torch's global generator.

    Raises:
        UserError: timm does not know the model, or its size or options cannot work.
    """
    model = DualEncoder(
        VisionTower(config.vision, config.embed_dim), TextTower(config.text, tokenizer, config.embed_dim)
    )
    if config.activation_checkpointing:
        model.vision.checkpoint_activations()
        model.text.checkpoint_activations()
    return model


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
