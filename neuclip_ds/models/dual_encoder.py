"""The dual encoder of CLIP: two towers and their L2-normalized features in the joint space.

It has no loss; the temperature is a float32 parameter of the objective, outside DeepSpeed's engine.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional

from neuclip_ds.config import ModelConfig
from neuclip_ds.models.image_models import new_vision_tower
from neuclip_ds.models.recompute import checkpoint_activations
from neuclip_ds.models.text_models import new_text_tower
from neuclip_ds.models.tokenizer import CaptionTokenizer
from neuclip_ds.models.towers import TextTower, VisionTower
from neuclip_ds.models.trained_parts import TOWERS, add_adapters, freeze, lock_projection


class DualEncoder(nn.Module):
    """An image and a text tower with features of width d."""

    def __init__(self, vision: VisionTower, text: TextTower) -> None:
        super().__init__()
        self.vision, self.text = vision, text

    def forward(
        self, image: Tensor | None, tokens: Tensor | None, text_ready: Callable[[Tensor], None] | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the features of images and captions, or None where the input is None.

        Args:
            image: (b, 3, H, W) uint8 pixels.
            tokens: (b, T) int64 ids of a `CaptionTokenizer`.
            text_ready: called with the text features before the image tower runs.

        Returns:
            (b, d) image and text features of unit norm in float32, whatever the dtype of the weights.
        """
        # The text tower, the faster one, runs first: the gather of its features can overlap the image tower.
        text_features = None if tokens is None else _to_sphere(self.text(tokens))
        if text_ready is not None and text_features is not None:
            text_ready(text_features)
        image_features = None if image is None else _to_sphere(self.vision(image))
        return image_features, text_features

    def compile_towers(self) -> None:
        """Compile the towers with torch.compile at their first call; parameter names do not change."""
        self.vision.compile()
        self.text.compile()


def build_dual_encoder(
    config: ModelConfig,
    tokenizer: CaptionTokenizer,
    image_weights: Mapping[str, Tensor] | None = None,
    text_tower: Callable[[], TextTower] | None = None,
) -> DualEncoder:
    """Build the dual encoder of a config; random weights depend on torch's seed only.

    Both towers use OpenAI's quick GELU if the image model is one of timm's `quickgelu` variants, else GELU, as in
    open_clip's configs.

    Args:
        config: of the towers.
        tokenizer: of the text tower, where it is a new one.
        image_weights: tensors that the image tower starts from; random ones by default.
        text_tower: builds the text tower; by default a new one of the config.

    Raises:
        UserError: the towers cannot be built, or cannot do what the config asks for.
    """
    vision = new_vision_tower(config.vision, config.embed_dim, image_weights)
    if text_tower is None:
        activation = "quick_gelu" if "quickgelu" in config.vision.name else "gelu"
        text = new_text_tower(config.text, tokenizer, config.embed_dim, activation)
    else:
        text = text_tower()
    model = DualEncoder(vision, text)
    for name in TOWERS:
        if getattr(config, name).pretrained and config.trained(name) == "frozen":
            lock_projection(model.get_submodule(name), name)
    return prepare(model, config)


def prepare(model: DualEncoder, config: ModelConfig) -> DualEncoder:
    """Apply the options that hold for every model, in place: activation checkpointing, what trains, adapters."""
    for name in TOWERS:
        checkpoint_activations(model.get_submodule(name), name, config.activation_checkpointing)
    freeze(model, config)
    if config.lora.rank:
        add_adapters({name: model.get_submodule(name) for name in TOWERS if config.trained(name) != "all"}, config.lora)
    return model


def _to_sphere(features: Tensor) -> Tensor:
    return functional.normalize(features.float(), dim=-1)
