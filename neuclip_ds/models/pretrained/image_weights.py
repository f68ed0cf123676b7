"""Locate the weights that `model.vision.pretrained` names: one of timm's tags, or a file."""

from pathlib import Path
from typing import Any, NamedTuple

import timm

from neuclip_ds.config import Channels, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.image_models import weights_name
from neuclip_ds.models.pretrained.files import download


class ImageWeights(NamedTuple):
    """Location of an image tower's weights, as found by `locate_image_weights`; can be sent to other ranks."""

    path: str  # the weights file
    mean: Channels  # per channel, of the pixels that they were trained on
    std: Channels


def locate_image_weights(vision: VisionConfig) -> ImageWeights:
    """Locate the weights, downloading them from the hub if needed; call on one rank only.

    Raises:
        UserError: no weights have that name, or they cannot be downloaded.
    """
    known = timm.get_pretrained_cfg(weights_name(vision))
    path = Path(vision.pretrained).expanduser()
    if not path.is_file():
        path = _download(vision, known)
    mean, std = (known.mean, known.std) if known is not None else vision.statistics()
    return ImageWeights(str(path.resolve()), vision.mean or tuple(mean), vision.std or tuple(std))


def _download(vision: VisionConfig, known: Any) -> Path:
    """Download the weights of a tag, which timm's config `known` describes; return the file."""
    tagged = weights_name(vision)
    if known is None or tagged == vision.name:
        tags = [name.partition(".")[2] for name in timm.list_pretrained(f"{vision.name}.*")]
        raise UserError(
            f"model.vision.pretrained={vision.pretrained} is neither a file nor a tag of timm's {vision.name}: "
            f"{', '.join(tags) or 'it has none'}."
        )
    if not known.hf_hub_id:
        raise UserError(
            f"timm's {tagged} is not on the hub; download {known.url} and set model.vision.pretrained to the file."
        )
    file = known.hf_hub_filename or "model.safetensors"
    return download(known.hf_hub_id, [file], "model.vision.pretrained") / file
