"""From what a user names as data to a list of tar files."""

from __future__ import annotations

import glob
from pathlib import Path

from braceexpand import braceexpand

from neuclip_ds.errors import UserError


def resolve_shards(source: str) -> list[str]:
    """Absolute paths of the tars that `source` names.

    Args:
        source: a tar; a folder (its *.tar in order of name, those of its subfolders where it has none itself);
            a glob (`/data/*.tar`); or a brace pattern (`/data/{00000..00127}.tar`), which keeps its own order and
            may hold globs.

    Raises:
        UserError: nothing is there under that name, or a folder holds no tars.
    """
    if not source.strip():
        raise UserError("The data source is empty; name a folder of tar shards, a glob, a brace pattern or a manifest.")
    path = Path(source).expanduser()
    if path.is_dir():
        return _tars_of(path)
    if path.exists():
        return [str(path.absolute())]
    return _matches(str(path))


def _tars_of(folder: Path) -> list[str]:
    tars = sorted(folder.glob("*.tar")) or sorted(folder.rglob("*.tar"))
    if not tars:
        raise UserError(f"No *.tar in {folder} or its subfolders; name the folder that holds the shards.")
    return [str(tar.absolute()) for tar in tars]


def _matches(pattern: str) -> list[str]:
    try:
        names = list(braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"The braces of {pattern} do not match; close every one of them.") from error
    found = [_expand(name) if glob.has_magic(name) else [name] for name in names]
    paths = [Path(path) for matches in found for path in matches]
    missing = [path for path in paths if not path.exists()]
    if not paths:
        raise UserError(f"Nothing matches {pattern}; check the folder and the pattern.")
    if missing and len(names) == 1:
        raise UserError(f"{pattern} does not exist; check the path.")
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(paths)} shards of {pattern} do not exist, "
            f"the first being {missing[0]}; correct the range or restore the files."
        )
    return [str(path.absolute()) for path in paths]


def _expand(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
