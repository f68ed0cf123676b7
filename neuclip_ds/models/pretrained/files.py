"""Read JSON and tensors of checkpoints without running code, and download files from the hub."""

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

SMALL_FILES = ("*.json", "*.txt", "*.model")  # configs and tokenizers; no weights


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise UserError if the file is missing or is not a JSON object."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}; put the checkpoint's file there.")
    with explained(f"{path} is not valid JSON or not an object", "put the checkpoint's file there"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file; raise UserError if it is missing, broken, or would run code."""
    if not path.is_file():
        raise UserError(f"The weights file {path} does not exist; put it there or name another one.")
    with explained(
        f"The weights file {path} cannot be read as plain tensors", "use a safetensors file or a plain state dict"
    ):
        if path.suffix == ".safetensors":
            return load_file(path)
        tree = torch.load(path, map_location="cpu", weights_only=True)
        return {str(key).removeprefix("module."): value.detach() for key, value in tree.get("state_dict", tree).items()}


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first of these files that exists in the folder."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def save_small_files(source: Path, folder: Path) -> None:
    """Copy a checkpoint's files to a folder: everything but the weights."""
    for path in (path for pattern in SMALL_FILES for path in source.glob(pattern)):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, folder)


def fetch(name: str, weights: Sequence[str] = ()) -> Path:
    """Return the folder of a local or hub checkpoint with its small files; call on one rank only.

    Args:
        name: the value of `model.pretrained`.
        weights: file patterns, one for each format of weights (gigabytes); only the first with files is downloaded.

    Raises:
        UserError: no such folder exists, and it cannot be downloaded.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = download(name, SMALL_FILES, "model.pretrained")
        for pattern in weights:
            if any(download(name, [pattern], "model.pretrained").glob(pattern)):
                break
    return folder.resolve()


def download(name: str, patterns: Sequence[str], option: str) -> Path:
    """Return the local folder of a hub repository's files; raise UserError if neither hub nor cache has it."""
    with explained(
        f"{option}={name} is not a local folder and cannot be downloaded from the hub",
        "download the repository on a machine with network and name its folder, or copy it into the hub's cache "
        "(HF_HOME)",
    ):
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
