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
    """Location of an image tower's weights, as found by `locate_image_weights`; can be sent to other ranks."""

    path: str  # the weights file
    mean: Channels  # per channel, of the pixels that they were trained on
    std: Channels


def locate_image_weights(vision: VisionConfig) -> ImageWeights:
    """Locate the weights, downloading them from the hub if needed; call on one rank only.

    Raises:
        UserError: no weights have that name, or they belong to another model, or cannot be downloaded.
    """
    path, known = Path(vision.pretrained).expanduser(), timm.get_pretrained_cfg(weights_name(vision))
    config: Mapping[str, Any] = {} if known is None else known.to_dict()
    if not path.is_file():
        files = [*filter(None, [config.get("hf_hub_filename")]), *_FILES]
        folder = path if path.is_dir() else _download(vision, config, files)
        described = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        architecture = described.get("architecture", vision.name)
        if architecture != vision.name:
            raise UserError(
                f"model.vision.pretrained={vision.pretrained} has weights of {architecture}; set model.vision.name to "
                "it."
            )
        found = first_file(folder, files)
        if found is None:
            raise UserError(f"{folder} has no weights; put {' or '.join(_FILES)} there.")
        path, config = found, described.get("pretrained_cfg", config)
    mean, std = vision.statistics()
    mean = vision.mean or tuple(config.get("mean", mean))
    return ImageWeights(str(path.resolve()), mean, vision.std or tuple(config.get("std", std)))


def _download(vision: VisionConfig, config: Mapping[str, Any], files: list[str]) -> Path:
    """Download the files of a timm tag or hub repository and return their folder."""
    tagged, hub = weights_name(vision), vision.pretrained
    if tagged != vision.name:
        hub = str(config.get("hf_hub_id", ""))
        if not hub:
            raise UserError(
                f"timm's {tagged} is not on the hub; download {config.get('url')} and set model.vision.pretrained to "
                "the file."
            )
    elif "/" not in hub:
        tags = [name.partition(".")[2] for name in timm.list_pretrained(f"{vision.name}.*")]
        raise UserError(
            f"model.vision.pretrained={hub} is not a file, folder, hub name, nor a tag of timm's {vision.name}: "
            f"{', '.join(tags) or 'it has none'}."
        )
    name = hub + tagged if hub.endswith("/") else hub
    folder = download(name, ["config.json", files[0]], "model.vision.pretrained")
    return folder if first_file(folder, files) else download(name, files, "model.vision.pretrained")
