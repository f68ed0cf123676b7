"""Pretrained dual encoders by `model.pretrained`: a local folder, a hub name, or `open_clip:...`.

Two steps, because a run of many ranks shall download once: `locate` on rank 0, `open_checkpoint` on all. A family is
one file of this package and one row of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained import open_clip_models, transformers_models
from neuclip_ds.models.pretrained.base import Checkpoint, Place
from neuclip_ds.models.pretrained.files import SMALL_FILES, download

FAMILIES: dict[str, Callable[[Place], Checkpoint]] = {
    "transformers": transformers_models.TransformersCheckpoint,
    "open_clip": open_clip_models.OpenClipCheckpoint,
}


def locate(name: str, weights: bool = True) -> Place:
    """Finds a checkpoint, downloading it where it is the hub's.

    Args:
        name: the value of `model.pretrained`.
        weights: False looks for the architecture alone, as a plan does.

    Raises:
        UserError: there is no such thing, or no network to fetch it.
    """
    prefix, mark, rest = name.rpartition("open_clip:")
    forced = bool(mark) and not prefix
    if forced and open_clip_models.is_architecture(rest.partition("/")[0]):
        return open_clip_models.locate(rest, weights)
    folder = Path(rest if forced else name).expanduser()
    if folder.is_file():
        raise UserError(
            f"model.pretrained={name} is a file, which does not tell its architecture; write "
            f"open_clip:ARCHITECTURE/{folder}, or name the folder of a whole checkpoint."
        )
    if not folder.is_dir():
        patterns = [*SMALL_FILES, *(("*.safetensors", "*.bin") if weights else ())]
        folder = download(rest if forced else name, patterns)
    return Place("open_clip" if forced else _family(folder), str(folder.resolve()))


def open_checkpoint(place: Place) -> Checkpoint:
    """The checkpoint at a place that `locate` gave, here or on another rank.

    Raises:
        UserError: a config or what the family needs is missing there.
    """
    if not Path(place.path).exists():
        raise UserError(f"Rank 0 found {place.path}, this rank does not: put the checkpoint under one path everywhere.")
    return FAMILIES[place.family](place)


def _family(folder: Path) -> str:
    if transformers_models.is_ours(folder):
        return "transformers"
    if (folder / open_clip_models.CONFIG).is_file():
        return "open_clip"
    raise UserError(
        f"{folder} holds no model that can be loaded: it needs the config.json of a transformers CLIPModel or "
        f"SiglipModel, or open_clip's {open_clip_models.CONFIG}."
    )
