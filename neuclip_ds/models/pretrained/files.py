"""Read the JSON files and tensors of checkpoints without running code from them, and download files from the hub."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.errors import UserError, explained

SENTENCE_TRANSFORMERS = "sentence_transformers"  # name of the format
SMALL_FILES = ("*.json", "*.txt", "*.model")  # configs and tokenizers, but no weights


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise UserError if the file is missing or does not contain one."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}; put the checkpoint's file there.")
    with explained(f"{path} is not valid JSON or not an object", "put the checkpoint's file there"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors from a safetensors or torch file; raise UserError if it is missing, is corrupt or contains code."""
    if not path.is_file():
        raise UserError(f"The weights file {path} does not exist; put it there or name a different one.")
    with explained(
        f"The weights file {path} cannot be read as plain tensors", "use a safetensors file or a plain state dict"
    ):
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = content.get("state_dict", content)
        return {str(name).removeprefix("module."): tensor.detach() for name, tensor in state.items()}


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the path of the first file in `names` that exists in the folder, or None."""
    for name in names:
        path = folder / name
        if path.is_file():
            return path
    return None


def save_small_files(source: Path, folder: Path) -> None:
    """Copy a checkpoint's files, except the weights, to a folder."""
    for pattern in SMALL_FILES:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder)


def fetch(name: str, weights: Sequence[str] = ()) -> Path:
    """Return a checkpoint's local folder, downloading files from the hub if needed; call on one rank only.

    Args:
        name: the value of `model.pretrained`.
        weights: file patterns, one per weights format; only the first format found is downloaded (to save space).

    Raises:
        UserError: no such folder exists, and the checkpoint cannot be downloaded.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = download(name, SMALL_FILES, "model.pretrained")
        for pattern in weights:
            if any(download(name, [pattern], "model.pretrained").glob(pattern)):
                break
    return folder.resolve()


def download(name: str, patterns: Sequence[str], option: str) -> Path:
    """Return a folder with files from a hub repository, downloading them if needed; raise UserError on failure."""
    with explained(
        f"{option}={name} is not a local folder and cannot be downloaded from the hub",
        "download the repository on a machine with network and name its folder, or copy it into the hub's cache "
        "(HF_HOME)",
    ):
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
