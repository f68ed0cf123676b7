"""Open the pretrained dual encoder given by `model.pretrained` (a local folder, a hub name, or `open_clip:...`).

A run calls `locate` on rank 0 and then `open_checkpoint` on all ranks, so that only rank 0 downloads the checkpoint. If
open_clip's config names a text encoder or tokenizer on the hub, every rank loads its small files from there.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.config import ModelConfig
from neuclip_ds.errors import UserError
from neuclip_ds.files import expand_user
from neuclip_ds.models.pretrained import open_clip_models, transformers_models
from neuclip_ds.models.pretrained.base import CheckpointRef, ModelSource
from neuclip_ds.models.pretrained.files import fetch, read_json

_AS_PUBLISHED = ModelConfig()


def locate(name: str, weights: bool = True) -> CheckpointRef:
    """Locate a checkpoint, downloading it from the hub if needed.

    Args:
        name: the value of `model.pretrained`.
        weights: whether to locate the weights as well; planning needs only the architecture.

    Raises:
        UserError: the checkpoint does not exist, cannot be downloaded or is not supported, is a file without an
            architecture, or needs open_clip, which is not installed; or as in `locate_by_name`.
    """
    path = name.removeprefix("open_clip:")
    names_open_clip = path != name
    if names_open_clip and path.partition("/")[0] in open_clip_models.import_open_clip().list_models():
        return open_clip_models.locate_by_name(path, weights)
    if Path(expand_user(path)).is_file():
        raise UserError(
            f"{name} is a file of weights, which does not name its architecture; pass open_clip:ARCHITECTURE/{path}, "
            "or the folder of a complete checkpoint."
        )
    library = "open_clip" if names_open_clip else _library_of(fetch(path))
    patterns = LIBRARIES[library].weight_patterns if weights else ()
    return CheckpointRef(library, str(fetch(path, patterns)))


def open_checkpoint(ref: CheckpointRef, config: ModelConfig = _AS_PUBLISHED) -> ModelSource:
    """Open the checkpoint that `locate` found, on any rank.

    Raises:
        UserError: the checkpoint is not on this node, a required file is missing, incomplete or unsupported, the model
            does not support the image size in `config`, or open_clip is needed and not installed.
    """
    if not Path(ref.path).exists():
        raise UserError(
            f"{ref.path} exists on rank 0, but not on this node; put the checkpoint under the same path on every node."
        )
    return LIBRARIES[ref.library].open(config, ref)


class Library(NamedTuple):
    """A library whose checkpoints can be opened."""

    open: Callable[[ModelConfig, CheckpointRef], ModelSource]
    weight_patterns: Sequence[str]  # of the weights files, one per format


LIBRARIES = {
    "transformers": Library(transformers_models.TransformersCheckpoint, transformers_models.WEIGHT_PATTERNS),
    "open_clip": Library(open_clip_models.OpenClipCheckpoint, open_clip_models.WEIGHT_PATTERNS),
}


def _library_of(folder: Path) -> str:
    """Return the library of the checkpoint in a folder; raise UserError if there is none that can be loaded."""
    config = folder / "config.json"
    if config.is_file() and read_json(config).get("model_type") in transformers_models.MODEL_TYPES:
        return "transformers"
    if (folder / open_clip_models.CONFIG_FILE).is_file():
        return "open_clip"
    raise UserError(
        f"{folder} contains no model that can be loaded: pass a run with a checkpoint, or a folder with the "
        f"config.json of a transformers model of type {', '.join(transformers_models.MODEL_TYPES)}, or with "
        f"open_clip's {open_clip_models.CONFIG_FILE}."
    )
