"""Reading what others have written: JSON and tensors as data alone, and the hub where there is network."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.errors import UserError

SMALL_FILES = ("*.json", "*.txt", "*.model")  # configs and tokenizers; no weights


def first_sentence(error: Exception) -> str:
    """What other libraries say at length, as a part of one sentence."""
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        UserError: it is missing or no JSON object.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}; put the checkpoint's own there.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); put the checkpoint's own there.") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object; put the checkpoint's own there.")
    return tree


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a torch file that holds nothing but data.

    Raises:
        UserError: it is missing, broken, or would run code.
    """
    if not path.is_file():
        raise UserError(f"There is no weights file {path}; put it there or name another.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = first_sentence(error)
        raise UserError(
            f"{path} is not a file of tensors alone ({reason}); put a safetensors file or a plain state dict there."
        ) from error
    tree = tree.get("state_dict", tree) if isinstance(tree, dict) else None
    tensors = {} if tree is None else {str(key).removeprefix("module."): value for key, value in tree.items()}
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{path} holds no state dict; put a safetensors file or a plain state dict there.")
    return tensors


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of the names that the folder has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def download(name: str, patterns: Sequence[str]) -> Path:
    """The local folder of a hub repository's files, fetched where the cache lacks them.

    Raises:
        UserError: neither the hub nor the cache can give it.
    """
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's own errors, and those of whatever HTTP library it uses
        reason = first_sentence(error)
        raise UserError(
            f"model.pretrained={name} is no local folder, and the hub did not give it ({reason}): download the "
            "repository where there is network and name its folder, or copy it into the hub's cache (HF_HOME)."
        ) from error
