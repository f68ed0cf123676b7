"""Write the files of each format from a package that is already in that format."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from neuclip_ds.models.pretrained import open_clip_models
from neuclip_ds.models.pretrained.base import Package, check_tensors
from neuclip_ds.models.pretrained.transformers_models import MODEL_TYPES


def write_transformers(package: Package, folder: Path) -> None:
    """Write config, weights, preprocessor and tokenizer for transformers' `AutoModel` and `AutoProcessor`."""
    kind = MODEL_TYPES[package.config["model_type"]]
    config = kind.config.from_dict({**package.config, "architectures": [kind.model.__name__], "dtype": "float32"})
    if hasattr(config, "projection_dim"):  # the classes of a single tower read it from its own config
        config.vision_config.projection_dim = config.text_config.projection_dim = config.projection_dim
    with torch.device("meta"):
        wanted = kind.model(config).state_dict()
    check_tensors(str(folder), wanted, package.weights)
    config.save_pretrained(folder)
    save_file(_plain(package), folder / "model.safetensors", metadata={"format": "pt"})
    kind.processor(package.preprocessing, config).save_pretrained(folder)
    package.tokenizer.save(folder)


def write_open_clip(package: Package, folder: Path) -> None:
    """Write open_clip_config.json, open_clip_model.safetensors and the tokenizer for open_clip's `local-dir:`."""
    with torch.device("meta"):
        wanted = open_clip_models.architecture(package.config, str(folder)).state_dict()
    check_tensors(str(folder), wanted, open_clip_models.custom_text_names(package.weights))
    open_clip_models.write_config(folder, package.config, package.preprocessing)
    save_file(_plain(package), folder / "open_clip_model.safetensors", metadata={"format": "pt"})
    package.tokenizer.save(folder)


def _plain(package: Package) -> dict[str, Tensor]:
    """Return contiguous float32 tensors that share no memory, as safetensors requires."""
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).contiguous().clone()
        for name, tensor in package.weights.items()
    }
