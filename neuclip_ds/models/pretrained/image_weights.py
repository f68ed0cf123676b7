"""Locate the weights that `model.vision.pretrained` names: timm's by tag, a hub repository, a folder or a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm

from neuclip_ds.config import Channels, VisionConfig
from neuclip_ds.errors import UserError
from neuclip_ds.models.image_models import weights_name
from neuclip_ds.models.pretrained.files import download, first_file, read_json

_FILES = ("model.safetensors", "pytorch_model.bin")


class ImageWeights(NamedTuple):
    """Weights of an image tower that `locate_image_weights` has found; can be sent to other ranks."""

    path: str  # the file
    mean: Channels  # of the pixels that they were trained on
    std: Channels


def locate_image_weights(vision: VisionConfig) -> ImageWeights:
    """Locate the weights, downloading them from the hub if needed; call on one rank only.

    Raises:
        UserError: there are none of that name, they are of another model, or cannot be downloaded.
    """
    named, known = Path(vision.pretrained).expanduser(), timm.get_pretrained_cfg(weights_name(vision))
    config: Mapping[str, Any] = {} if known is None else known.to_dict()
    if named.is_file():
        return _found(vision, named, config)
    if not named.is_dir():
        named = _download(vision, config)
    described = read_json(named / "config.json") if (named / "config.json").is_file() else {}
    architecture = described.get("architecture", vision.name)
    if architecture != vision.name:
        raise UserError(
            f"model.vision.pretrained={vision.pretrained} has weights of {architecture}; set model.vision.name to it."
        )
    path = first_file(named, [*filter(None, [config.get("hf_hub_filename")]), *_FILES])
    if path is None:
        raise UserError(f"{named} has no weights; put {' or '.join(_FILES)} there.")
    return _found(vision, path, described.get("pretrained_cfg", config))


def _download(vision: VisionConfig, config: Mapping[str, Any]) -> Path:
    """Return the folder of a tag's or hub name's files."""
    tagged = weights_name(vision)
    if tagged == vision.name and "/" not in vision.pretrained:
        tags = [name.partition(".")[2] for name in timm.list_pretrained(f"{vision.name}.*")]
        raise UserError(
            f"model.vision.pretrained={vision.pretrained} is no file, folder, hub name, nor a tag of timm's "
            f"{vision.name}: {', '.join(tags) or 'it has none'}."
        )
    hub = str(config.get("hf_hub_id", "")) if tagged != vision.name else vision.pretrained
    if not hub:
        raise UserError(
            f"timm's {tagged} is not on the hub; download {config.get('url')} and set model.vision.pretrained to the "
            "file."
        )
    name = hub + tagged if hub.endswith("/") else hub
    wanted = [*filter(None, [config.get("hf_hub_filename")]), *_FILES]
    folder = download(name, ["config.json", wanted[0]], "model.vision.pretrained")
    return folder if first_file(folder, wanted) else download(name, wanted, "model.vision.pretrained")


def _found(vision: VisionConfig, path: Path, config: Mapping[str, Any]) -> ImageWeights:
    standard_mean, standard_std = vision.statistics()
    mean = vision.mean or tuple(config.get("mean", standard_mean))
    std = vision.std or tuple(config.get("std", standard_std))
    return ImageWeights(str(path.resolve()), mean, std)
