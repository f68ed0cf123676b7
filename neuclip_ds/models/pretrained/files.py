"""Read the JSON files and tensors of checkpoints without running code from them, and download files from the hub."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor

from neuclip_ds.errors import UserError, explained
from neuclip_ds.files import expand_user

SENTENCE_TRANSFORMERS = "sentence_transformers"  # name of the format
SMALL_FILES = ("*.json", "*.txt", "*.model")  # configs and tokenizers, but no weights
ADAPTER_FILE = "adapter_config.json"  # of the peft library
_STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")  # keys of the weights in training checkpoints
_NUMPY_SCALARS = (np.bool_, np.int32, np.int64, np.float32, np.float64)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise UserError if the file is missing or does not contain an object."""
    if not path.is_file():
        raise UserError(f"{path.parent} contains no {path.name}; put the checkpoint's file there.")
    with explained(f"{path} does not contain a valid JSON object", "replace it with the checkpoint's file"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a state dict from a safetensors file, a torch file or a training checkpoint.

    NumPy scalars, which some training checkpoints contain in the optimizer's state, are accepted. The prefixes that
    DDP, torch.compile and Lightning put before names are removed.

    Raises:
        UserError: the file is missing or corrupt, contains code, or does not contain a state dict.
    """
    if not path.is_file():
        raise UserError(f"The weights file {path} does not exist; put the file there, or correct the path.")
    with explained(
        f"The weights file {path} cannot be read as plain tensors",
        "download it again, or use a safetensors file or a plain state dict",
    ):
        if path.suffix == ".safetensors":
            return _unwrapped_names(load_file(path))
        with torch.serialization.safe_globals(_numpy_scalar_globals()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    return _unwrapped_names(_state_dict(content, path))


def _numpy_scalar_globals() -> list[Any]:
    """Return the functions and types in a pickled NumPy scalar; none of them runs code from the file."""
    scalar, _ = np.float64().__reduce__()[:2]
    functions = [(scalar, f"numpy.{module}.multiarray.scalar") for module in ("core", "_core")]  # numpy 1 and 2
    dtypes = [type(np.dtype(scalar_type)) for scalar_type in _NUMPY_SCALARS]
    return [*functions, np.dtype, *dtypes]


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors by name in the content of a file; raise UserError if the content is something else."""
    if isinstance(content, Mapping):
        nested = [content[key] for key in _STATE_KEYS if isinstance(content.get(key), Mapping)]
        state = nested[0] if nested else content
        if state and all(isinstance(value, Tensor) for value in state.values()):
            return {str(name): tensor.detach() for name, tensor in state.items()}
        keys = ", ".join(str(key) for key in list(state)[:5])
        contents = f"the keys {keys}" if keys else "nothing"
    else:
        contents = f"a {type(content).__name__}"
    raise UserError(
        f"The weights file {path} contains {contents} instead of a state dict; save the model's state_dict(), alone "
        "or under the key state_dict."
    )


def _unwrapped_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that they have without DDP, torch.compile and Lightning."""
    unwrapped = {name.replace("_orig_mod.", "").removeprefix("module."): tensor for name, tensor in state.items()}
    if all(name.startswith("model.") for name in unwrapped):
        return {name.removeprefix("model."): tensor for name, tensor in unwrapped.items()}
    return unwrapped


def refuse_adapter(folder: Path) -> None:
    """Raise UserError if a model's folder contains a peft adapter, which transformers would add to the model."""
    if (folder / ADAPTER_FILE).is_file():
        raise UserError(
            f"{folder} contains a model and a peft adapter ({ADAPTER_FILE}), which transformers would add to the "
            "model: merge the adapter with peft's merge_and_unload and save the result, or remove the adapter's files."
        )


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the path of the first file in `names` that exists in the folder, or None."""
    for name in names:
        path = folder / name
        if path.is_file():
            return path
    return None


def save_small_files(source: Path, folder: Path) -> None:
    """Copy a checkpoint's files that match SMALL_FILES, except the index of the weights, to a folder."""
    for pattern in SMALL_FILES:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder)


def fetch(name: str, weights: Sequence[str] = ()) -> Path:
    """Return a checkpoint's local folder, downloading files from the hub if needed; call on one rank only.

    Args:
        name: the value of `model.pretrained`, without the prefix `open_clip:`.
        weights: file patterns, one per weights format; only the first format found is downloaded (to save space).

    Raises:
        UserError: no such folder exists, and the checkpoint cannot be downloaded.
    """
    folder = Path(expand_user(name))
    if not folder.is_dir():
        folder = download(name, SMALL_FILES)
        for pattern in weights:
            if any(download(name, [pattern]).glob(pattern)):
                break
    return folder.resolve()


def download(name: str, patterns: Sequence[str], setting: str = "") -> Path:
    """Return a folder with files from a hub repository, downloading them if needed.

    Args:
        name: name of the repository.
        patterns: patterns of the files.
        setting: text before the name in the setting that contains it, such as `MODEL=hf:`, for messages.

    Raises:
        UserError: the files cannot be downloaded.
    """
    form = f" as {setting}FOLDER" if setting else ""
    with explained(
        f"{setting}{name} is not a local folder and cannot be downloaded from the hub",
        f"download the repository on a machine with network access and pass its folder{form}, or copy the repository "
        "into this machine's hub cache (HF_HOME/hub)",
    ):
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
