"""Pretrained dual encoders by `model.pretrained`: a local folder, a hub name, or `open_clip:...`.

Two steps, because a run of many ranks shall download once: `locate` on rank 0, `open_checkpoint` on all. A family is
one file of this package and one row of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained import open_clip_models, transformers_models
from neuclip_ds.models.pretrained.base import Checkpoint, CheckpointRef
from neuclip_ds.models.pretrained.files import SMALL_FILES, download


class Family(NamedTuple):
    """A library whose files can be read."""

    open: Callable[[CheckpointRef], Checkpoint]
    weight_files: tuple[str, ...]  # patterns, the first that a repository has is fetched


FAMILIES = {
    "transformers": Family(transformers_models.TransformersCheckpoint, ("model*.safetensors", "pytorch_model*.bin")),
    "open_clip": Family(open_clip_models.OpenClipCheckpoint, ("open_clip*.safetensors", "open_clip*.bin")),
}


def locate(name: str, weights: bool = True) -> CheckpointRef:
    """Finds a checkpoint, downloading it where it is the hub's.

    Args:
        name: the value of `model.pretrained`.
        weights: False looks for the architecture alone, as a plan does.

    Raises:
        UserError: there is no such thing, or no network to fetch it.
    """
    rest = name.removeprefix("open_clip:")
    forced = rest != name
    if forced and open_clip_models.is_architecture(rest.partition("/")[0]):
        return open_clip_models.locate(rest, weights)
    folder = Path(rest).expanduser()
    if folder.is_file():
        raise UserError(
            f"model.pretrained={name} is a file, which does not tell its architecture; write "
            f"open_clip:ARCHITECTURE/{folder}, or name the folder of a whole checkpoint."
        )
    local = folder.is_dir()
    if not local:
        folder = download(rest, SMALL_FILES)
    family = "open_clip" if forced else _family(folder)
    if weights and not local:
        _download_weights(rest, FAMILIES[family].weight_files)
    return CheckpointRef(family, str(folder.resolve()))


def open_checkpoint(ref: CheckpointRef) -> Checkpoint:
    """The checkpoint at a ref that `locate` gave, here or on another rank.

    Raises:
        UserError: a config or what the family needs is missing there.
    """
    if not Path(ref.path).exists():
        raise UserError(f"Rank 0 found {ref.path}, this rank does not: put the checkpoint under one path everywhere.")
    return FAMILIES[ref.family].open(ref)


def _download_weights(name: str, patterns: Sequence[str]) -> None:
    """Repositories often hold the same weights in several forms, gigabytes each: one is enough."""
    for pattern in patterns:
        if any(download(name, [pattern]).glob(pattern)):
            return


def _family(folder: Path) -> str:
    if transformers_models.is_transformers_model(folder):
        return "transformers"
    if (folder / open_clip_models.CONFIG).is_file():
        return "open_clip"
    raise UserError(
        f"{folder} holds no model that can be loaded: it needs the config.json of a transformers CLIPModel or "
        f"SiglipModel, or open_clip's {open_clip_models.CONFIG}."
    )
