"""Image encoders of the timm library as towers, given by ARCHITECTURE.TAG, ARCHITECTURE/FILE or a folder.

ARCHITECTURE alone stands for timm's default weights. A folder contains the weights and timm's config.json, which gives
the architecture and the preprocessing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm

from neuclip_ds.config import Channels, VisionConfig
from neuclip_ds.errors import UserError, explained
from neuclip_ds.files import expand_user
from neuclip_ds.models.image_models import SET_ELSEWHERE, locate_image_weights, pretrained_trunk
from neuclip_ds.models.pretrained.base import Preprocessing
from neuclip_ds.models.pretrained.files import first_file, read_json, read_tensors
from neuclip_ds.models.towers import VisionTower

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class ImageEncoderRef:
    """Location and preprocessing of an image encoder; can be sent to other ranks."""

    architecture: str  # of timm
    options: Mapping[str, Any]  # arguments of `timm.create_model`
    weights: str  # path of the file
    image_size: int  # pixels
    mean: Channels  # per channel, of pixels in [0, 1]
    std: Channels
    squash: bool  # as in `Preprocessing`

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of the encoder's images."""
        return Preprocessing(size=self.image_size, mean=self.mean, std=self.std, squash=self.squash)


def locate_image_encoder(name: str, image_size: int | None = None) -> ImageEncoderRef:
    """Locate an image encoder, downloading its weights from the hub if needed; call on one rank only.

    Args:
        name: ARCHITECTURE.TAG, ARCHITECTURE/FILE or a folder, as described in this module's docstring.
        image_size: side of the images in pixels; by default, the input size in timm's config of the model or in the
            folder's config.json, or 224 if timm has no config of the model.

    Raises:
        UserError: there is no such model, the weights do not exist or cannot be downloaded, or a folder's config.json
            is missing or invalid.
    """
    folder = Path(expand_user(name))
    if folder.is_dir():
        return _read_folder(folder.resolve(), image_size)
    tagged, _, file = name.partition("/")
    architecture, _, tag = tagged.partition(".")
    if not timm.is_model(architecture):
        raise UserError(
            f"timm has no model {architecture!r}, and there is no folder {name}: pass timm:FOLDER, or timm:MODEL with "
            "a model in timm.list_models()."
        )
    pretrained_cfg = timm.get_pretrained_cfg(tagged if timm.models.is_model_pretrained(tagged) else architecture)
    weights_name = file or tag
    size = 224
    if pretrained_cfg is not None:
        weights_name = weights_name or pretrained_cfg.tag
        size = pretrained_cfg.input_size[-1]
    if not weights_name:
        raise UserError(
            f"timm has no weights for {architecture}: pass a file of weights as timm:{architecture}/FILE, or a folder "
            "with config.json and model.safetensors as timm:FOLDER."
        )
    vision = VisionConfig(name=architecture, pretrained=weights_name, image_size=image_size or size)
    weights = locate_image_weights(vision, f"MODEL=timm:{name}", f"timm:{architecture}/FILE")
    return ImageEncoderRef(
        architecture=architecture,
        options={},
        weights=weights.path,
        image_size=vision.resolved_image_size(),
        mean=weights.mean,
        std=weights.std,
        squash=weights.squash,
    )


def _read_folder(folder: Path, image_size: int | None) -> ImageEncoderRef:
    """Return the encoder in a folder in timm's format; raise UserError if config.json or the weights are unusable."""
    config = read_json(folder / "config.json")
    weights = first_file(folder, _WEIGHTS)
    if weights is None:
        raise UserError(f"{folder} contains no weights; put {_WEIGHTS[0]} (or {_WEIGHTS[1]}) there.")
    with explained(f"{folder / 'config.json'} is not a config of timm", "save the model with timm's save_for_hf"):
        pretrained_cfg = config.get("pretrained_cfg", config)
        return ImageEncoderRef(
            architecture=config["architecture"].partition(".")[0],
            options=config.get("model_args") or {},
            weights=str(weights),
            image_size=image_size or int(pretrained_cfg["input_size"][-1]),
            mean=tuple(pretrained_cfg["mean"]),
            std=tuple(pretrained_cfg["std"]),
            squash=pretrained_cfg.get("crop_mode") == "squash",
        )


def open_image_encoder(ref: ImageEncoderRef) -> VisionTower:
    """Load an image encoder as a tower without a projection, in float32.

    Raises UserError as in `read_tensors` and `pretrained_trunk`.
    """
    options = {name: value for name, value in ref.options.items() if name not in SET_ELSEWHERE}
    vision = VisionConfig(name=ref.architecture, pretrained=ref.weights, image_size=ref.image_size, options=options)
    weights = read_tensors(Path(ref.weights))
    trunk = pretrained_trunk(vision, weights)
    return VisionTower(trunk, None, ref.mean, ref.std)
