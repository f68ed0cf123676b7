"""CLIP's dual encoder: two towers, each an encoder from any library and a projection to the joint embedding space.

The model does not compute a loss. The temperature belongs to the objective, in float32 and outside DeepSpeed's engine,
because DeepSpeed does not support 0-dimensional parameters, and ZeRO 3 does not gather a parameter that is used outside
the model's forward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuclip_ds.config import Projection
from neuclip_ds.models.packing import Pack, PackedCaptions


class Encoder(nn.Module, ABC):
    """Tower that maps b images or captions to features (b, d) in the dtype of its weights.

    Its input is uint8 pixels (b, 3, H, W), int64 token ids (b, T), packed captions, or stored outputs of the trunk:
    floating-point (b, width), to which only the projection is applied.

    Args:
        trunk: the encoder.
        projection: maps the trunk's feature to the joint embedding space; None if the trunk does so itself.

    Attributes:
        projection_dropout: dropout rate on the projection's inputs in training.
    """

    projection_dropout = 0.0

    def __init__(self, trunk: Any, projection: nn.Module | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.projection = nn.Identity() if projection is None else projection

    @abstractmethod
    def feature(self, x: Any) -> Tensor:
        """Return the trunk's (b, width) features."""

    def forward(self, x: Any) -> Tensor:
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 2:
            feature = x.to(next(self.projection.parameters()).dtype)
        else:
            feature = self.feature(x)
        if self.projection_dropout:
            feature = functional.dropout(feature, self.projection_dropout, self.training)
        return self.projection(feature)

    def train(self, mode: bool = True) -> "Encoder":
        """Set training mode, but leave modules with only frozen weights in evaluation mode.

        Frozen modules do not apply dropout or update their batch-norm statistics.
        """
        super().train(mode)
        if not mode:
            return self
        for module in self.modules():
            weights = list(module.parameters())
            if weights and not any(weight.requires_grad for weight in weights):
                module.eval()
        return self


class VisionTower(Encoder):
    """Image tower whose trunk comes from timm, transformers or open_clip.

    Args:
        trunk, projection: as in `Encoder`; the trunk returns the pooled feature, either directly or as `pooler_output`.
        mean, std: per-channel mean and standard deviation of the trunk's training images, with pixels in [0, 1].
    """

    def __init__(self, trunk: Any, projection: nn.Module | None, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(trunk, projection)
        self._mean = mean
        self._std = std
        self._set_constants()
        convolutions = [layer for layer in trunk.modules() if isinstance(layer, nn.Conv2d)]
        self._is_convolutional = len(convolutions) > 1  # a ViT has one, which embeds the patches

    def normalize(self, x: Tensor) -> Tensor:
        """Convert uint8 pixels (b, 3, H, W) to float32: divide by 255, then normalize each channel with its statistics.

        Raises:
            TypeError: the pixels are not uint8.
        """
        if x.dtype != torch.uint8:
            raise TypeError(f"images must be uint8 pixels, not {x.dtype}: the tower normalizes them itself")
        return torch.addcmul(self._shift, x, self._scale)

    def _set_constants(self) -> None:
        """Set the scale and shift of `normalize`, each (3, 1, 1) in float32, on the device of the parameters.

        They are not buffers, which DeepSpeed would cast to bf16.
        """
        device = next(self.parameters()).device
        std = torch.tensor(self._std, dtype=torch.float64)[:, None, None]
        mean = torch.tensor(self._mean, dtype=torch.float64)[:, None, None]
        self._scale = (1 / (255 * std)).to(device, torch.float32)
        self._shift = (-mean / std).to(device, torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "VisionTower":
        """Move the constants too when the module moves to another device; torch calls this for `to` and `cuda`."""
        super()._apply(fn, recurse)
        self._set_constants()
        return self

    def feature(self, x: Tensor) -> Tensor:
        # Channels-last saves cuDNN a transposition around each convolution, and suits depthwise convolutions on a CPU:
        # a step of tf_efficientnet_lite0 takes half the time. Activations inherit the pixels' layout; weights stay
        # contiguous, because ZeRO flattens them, and are transposed in each convolution.
        layout = torch.channels_last if self._is_convolutional else torch.preserve_format
        dtype = next(self.parameters()).dtype
        pixels = self.normalize(x).to(dtype, memory_format=layout)
        return _pooled(self.trunk(pixels))


class TextTower(Encoder):
    """Text tower whose trunk comes from transformers or open_clip.

    Args:
        trunk, projection: as in `VisionTower`, but the trunk may instead return hidden states (b, T, width).
        eos_id: hidden states are pooled at the first token with this id; None if the trunk does the pooling.
        pack: function that packs captions for the trunk, which accepts packed captions and then returns features
            (b, width); None if the trunk needs padded captions.

    Attributes:
        pack: the function that packs captions, or None.
        packed: whether the tower packs captions; `auto` means on CPUs only.
    """

    def __init__(
        self, trunk: Any, projection: nn.Module | None, eos_id: int | None = None, pack: Pack | None = None
    ) -> None:
        super().__init__(trunk, projection)
        self.eos_id = eos_id
        self.pack = pack
        self.packed: bool | Literal["auto"] = "auto"

    def packs_on(self, device: torch.device) -> bool:
        """Return whether the tower packs captions on a device."""
        if self.pack is None:
            return False
        if self.packed == "auto":  # packing has not been measured on a GPU yet
            return device.type == "cpu"
        return self.packed

    def feature(self, x: Tensor | PackedCaptions) -> Tensor:
        """Return the (b, width) features of packed captions or of (b, T) token ids, which the tower may pack first."""
        if self.pack is not None and isinstance(x, Tensor) and self.packs_on(x.device):
            x = self.pack(x)
        if self.eos_id is None or isinstance(x, PackedCaptions):
            return _pooled(self.trunk(x))
        hidden = self.trunk(input_ids=x).last_hidden_state
        first_eos = x.eq(self.eos_id).int().argmax(dim=1)  # (b,) positions
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return hidden[rows, first_eos]


def _pooled(output: Any) -> Tensor:
    """Return the pooled feature of a trunk that returns it directly or as `pooler_output`."""
    feature: Tensor = getattr(output, "pooler_output", output)
    return feature


def new_projection(width: int, embed_dim: int, kind: Projection = "linear") -> nn.Module:
    """Return a projection from a trunk's feature to the joint embedding space, without biases and with random weights.

    Args:
        width: width of the trunk's feature.
        embed_dim: width d of the joint embedding space.
        kind: `linear` as in CLIP, or `mlp`, which is open_clip's `hf_proj_type` of the same name: two linear layers
            with (width + d) // 2 hidden units and GELU between them.
    """
    if kind == "linear":
        return _linear(width, embed_dim)
    hidden = (width + embed_dim) // 2
    return nn.Sequential(_linear(width, hidden), nn.GELU(), _linear(hidden, embed_dim))


def _linear(width: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias, with CLIP's random weights."""
    layer = nn.Linear(width, outputs, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


class DualEncoder(nn.Module):
    """An image tower and a text tower whose features have the same width d."""

    def __init__(self, vision: VisionTower, text: TextTower) -> None:
        super().__init__()
        self.vision = vision
        self.text = text

    def forward(
        self,
        image: Tensor | None,
        tokens: Tensor | PackedCaptions | None,
        text_ready: Callable[[Tensor], None] | None = None,
        image_first: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the features of the images and of the captions, or None for an input that is None.

        Args:
            image: (b, 3, H, W) uint8 pixels, or (b, width) stored outputs of the image trunk.
            tokens: (b, T) int64 ids from the model's tokenizer, the captions packed by `self.text.pack`, or (b, width)
                stored outputs of the text trunk.
            text_ready: function that is called with the text features as soon as the text tower has run.
            image_first: whether to run the image tower before the text tower.

        Returns:
            Image and text features, each (b, d), of unit norm and in float32, whatever the dtype of the weights.
        """
        image_features = None
        text_features = None
        # docs: features
        if image is not None and image_first:
            image_features = _to_unit_norm(self.vision(image))
        if tokens is not None:
            text_features = _to_unit_norm(self.text(tokens))
            if text_ready is not None:
                text_ready(text_features)
        if image is not None and not image_first:
            image_features = _to_unit_norm(self.vision(image))
        return image_features, text_features
        # docs: end


def _to_unit_norm(features: Tensor) -> Tensor:
    return functional.normalize(features.float(), dim=-1)
