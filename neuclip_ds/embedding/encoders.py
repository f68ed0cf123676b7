"""Encode the images and captions of a dataset, with a dual encoder or a single encoder from timm or transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from neuclip_ds.data.dataset import Tokenize
from neuclip_ds.distributed.communicator import Communicator, to_device
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import Preprocessing
from neuclip_ds.models.pretrained.image_encoder import ImageEncoderRef, locate_image_encoder, open_image_encoder
from neuclip_ds.models.pretrained.text_encoder import Pooling, locate_text_encoder, open_text_encoder
from neuclip_ds.models.tokenizer import ModelTokenizer
from neuclip_ds.models.towers import DualEncoder
from neuclip_ds.models.trunk_output import image_sample, text_sample, trunk_output
from neuclip_ds.models.weights_hash import weights_hash

Output = Literal["joint", "trunk"]
"""Stored features: normalized features in the joint space, or the towers' pooled outputs before the projection."""

EncodeOne = Callable[[Tensor], Tensor]
"""Function from host tensors, uint8 pixels (b, 3, H, W) or int64 ids (b, T), to float32 features (b, d) on a device."""


@dataclass(frozen=True, kw_only=True)
class TrunkRecords:
    """Records that identify the `image` and `text` trunks; a run compares them with records of its own trunks."""

    weights: Mapping[str, str] = field(default_factory=dict)  # results of `weights_hash`
    outputs: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of `trunk_output`; empty for joint features


@dataclass(frozen=True, kw_only=True)
class FeatureEncoders:
    """Functions and settings to encode images, captions or both."""

    name: str  # of the model, as recorded in embedding.json
    output: Output
    image: EncodeOne | None = None
    preprocessing: Preprocessing | None = None  # of images
    text: EncodeOne | None = None
    tokenize: Tokenize | None = None
    pooling: Pooling | None = None  # of a transformers text encoder
    context_length: int | None = None  # maximum number of tokens per caption
    trunks: TrunkRecords = field(default_factory=TrunkRecords)

    def image_width(self) -> int | None:
        """Encode a black image and return the width of its feature, or None if there is no image encoder."""
        if self.image is None or self.preprocessing is None:
            return None
        side = self.preprocessing.size
        return self.image(torch.zeros(1, 3, side, side, dtype=torch.uint8)).shape[1]

    def text_width(self) -> int | None:
        """Encode a letter and return the width of its feature, or None if there is no text encoder."""
        if self.text is None or self.tokenize is None:
            return None
        return self.text(self.tokenize(["a"])).shape[1]


def dual_encoders(
    name: str,
    model: DualEncoder,
    tokenizer: ModelTokenizer,
    preprocessing: Preprocessing,
    output: Output,
    trunks: TrunkRecords,
) -> FeatureEncoders:
    """Return the encoders of a model, which run on the model's device.

    `trunks` is the result of `record_trunks`, or empty if the features are not stored. Raises UserError if `output` is
    `trunk` and a tower has no separate projection.
    """
    if output == "trunk":
        if isinstance(model.vision.projection, nn.Identity) or isinstance(model.text.projection, nn.Identity):
            raise UserError(
                f"A tower of {name} has no separate projection, so only joint features can be stored: set "
                "--output joint."
            )
        image = _encode_with(model, model.vision.feature)
        text = _encode_with(model, model.text.feature)
    else:
        image = _encode_with(model, lambda pixels: model(pixels, None)[0])
        text = _encode_with(model, lambda tokens: model(None, tokens)[1])
    return FeatureEncoders(
        name=name,
        output=output,
        image=image,
        preprocessing=preprocessing,
        text=text,
        tokenize=tokenizer,
        pooling=getattr(model.text, "pooling", None),
        context_length=tokenizer.context_length,
        trunks=trunks,
    )


def record_trunks(
    model: DualEncoder, tokenizer: ModelTokenizer, image_size: int, output: Output, communicator: Communicator
) -> TrunkRecords:
    """Return the records of a model's trunks; the model must be on the host, with float32 weights.

    All ranks must call this function; rank 0 computes the records for all, with `outputs` only if `output` is `trunk`.
    """

    def record() -> TrunkRecords:
        outputs: dict[str, list[float]] = {}
        if output == "trunk":
            outputs["image"] = trunk_output(model.vision, image_sample(image_size))
            outputs["text"] = trunk_output(model.text, text_sample(tokenizer))
        weights = {"image": weights_hash(model.vision.trunk), "text": weights_hash(model.text.trunk)}
        return TrunkRecords(weights=weights, outputs=outputs)

    return communicator.value_from_rank_zero(TrunkRecords, record)


def image_encoders(
    name: str, communicator: Communicator, dtype: torch.dtype, image_size: int | None = None
) -> FeatureEncoders:
    """Open an image encoder on all ranks; `name` and `image_size` are as in `locate_image_encoder`.

    Raises UserError as in `locate_image_encoder` and `open_image_encoder`.
    """
    ref = communicator.value_from_rank_zero(ImageEncoderRef, lambda: locate_image_encoder(name, image_size))
    tower = open_image_encoder(ref)

    def record() -> TrunkRecords:
        output = trunk_output(tower, image_sample(ref.image_size))
        return TrunkRecords(weights={"image": weights_hash(tower.trunk)}, outputs={"image": output})

    trunks = communicator.value_from_rank_zero(TrunkRecords, record)
    tower = tower.to(communicator.device, dtype)
    return FeatureEncoders(
        name=f"timm:{name}",
        output="trunk",
        image=_encode_with(tower, tower),
        preprocessing=ref.preprocessing,
        trunks=trunks,
    )


def text_encoders(
    name: str,
    communicator: Communicator,
    dtype: torch.dtype,
    pooling: Pooling | None = None,
    context_length: int | None = None,
) -> FeatureEncoders:
    """Open a text encoder on all ranks; `name` is a folder or a name on the hub.

    `pooling` and `context_length` are as in `open_text_encoder`. Raises UserError as in `locate_text_encoder` and
    `open_text_encoder`.
    """
    folder = communicator.value_from_rank_zero(Path, lambda: locate_text_encoder(name))
    encoder = open_text_encoder(folder, pooling, context_length)

    def record() -> TrunkRecords:
        output = trunk_output(encoder.tower, text_sample(encoder.tokenizer))
        return TrunkRecords(weights={"text": weights_hash(encoder.tower.trunk)}, outputs={"text": output})

    trunks = communicator.value_from_rank_zero(TrunkRecords, record)
    tower = encoder.tower.to(communicator.device, dtype)
    return FeatureEncoders(
        name=f"hf:{name}",
        output="trunk",
        text=_encode_with(tower, tower),
        tokenize=encoder.tokenizer,
        pooling=encoder.tower.pooling,
        context_length=encoder.tokenizer.context_length,
        trunks=trunks,
    )


def _encode_with(module: nn.Module, function: Callable[[Tensor], Tensor]) -> EncodeOne:
    """Return a function that encodes host tensors on the module's device, without gradients, in evaluation mode."""
    module.eval()
    device = next(module.parameters()).device

    def encode(x: Tensor) -> Tensor:
        with torch.no_grad():
            return function(to_device(x, device)).float()

    return encode
