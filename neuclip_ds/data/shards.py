"""Resolve what a user names as data to a list of tar files."""

import glob
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
from braceexpand import braceexpand

from neuclip_ds.errors import UserError

_URL = re.compile(r"[a-z][a-z0-9+.-]*:")  # scheme://..., or pipe:COMMAND
_GLOB = re.compile(r"[*[]")  # in a URL, ? starts the query
_BETWEEN = "::"
_LIST = ".txt"
_COMMAND = "pipe:"
_RANGE = re.compile(r"\{(-?\d{1,18})\.\.(-?\d{1,18})")
_MAX_NAMES = 10_000_000


def is_local(path: str) -> bool:
    """Whether a shard is a file, on this machine or mounted, rather than a URL or a `pipe:` command."""
    return not _URL.match(path)


def refuse_commands(paths: Iterable[str], origin: str, option: str) -> None:
    """Raise UserError if a path is a `pipe:` command: a file from others must not decide what runs here."""
    if command := next((path for path in paths if path.startswith(_COMMAND)), None):
        raise UserError(
            f"The shard {command!r} of {origin} is a command, which would be run; allow it with {option} if you trust "
            "where it comes from."
        )


def resolve_shards(source: str, allow_commands: bool = False) -> list[str]:
    """Return the absolute paths or URLs of the tars that `source` names.

    Args:
        source: a tar; a folder (its *.tar sorted by name, or those of its subfolders if it has none);
            a glob (`/data/*.tar`); a brace pattern (`/data/{00000..00127}.tar`), which keeps its order and may contain
            globs; a URL that fsspec supports, with globs or braces (`s3://bucket/{00000..00127}.tar`); a command that
            outputs a tar (`pipe:aws s3 cp s3://bucket/{000..127}.tar -`); a text file (`shards.txt`) with one of these
            per line; or several of these joined by `::`.
        allow_commands: whether a text file may hold commands; in `source` itself they are allowed.

    Raises:
        UserError: nothing has that name, a folder holds no tars, or a text file holds commands or is no text.
    """
    try:
        return _resolve(source, allow_commands)
    except RecursionError as error:
        raise UserError(f"{source[:200]!a} is a list that names itself; name shards in it.") from error
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, ~ of nobody, no permission
        raise UserError(
            f"{source[:200]!a} cannot be looked up ({error}); check the path and its permissions."
        ) from error


def _resolve(source: str, allow_commands: bool) -> list[str]:
    if not source.strip():
        raise UserError("The data source is empty; name a folder of tar shards, a glob, a brace pattern or a manifest.")
    if _BETWEEN in source:
        return [path for part in source.split(_BETWEEN) for path in _resolve(part, allow_commands)]
    if not is_local(source):
        return _urls(source)
    path = Path(source).expanduser()
    if path.is_dir():
        tars = sorted(path.glob("*.tar")) or sorted(path.rglob("*.tar"))
        if not tars:
            raise UserError(f"No *.tar in {path} or its subfolders; name the folder that holds the shards.")
        return [str(tar.absolute()) for tar in tars]
    if path.is_file():
        return _listed(path, allow_commands) if path.suffix == _LIST else [str(path.absolute())]
    return _matches(str(path))


def _listed(path: Path, allow_commands: bool) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(f"The list {path} cannot be read ({error}); write it as UTF-8 text.") from error
    lines = [line for line in lines if line and not line.startswith("#")]
    if not allow_commands:
        refuse_commands(
            (part for line in lines for part in line.split(_BETWEEN)), f"the list {path}", "--allow-commands"
        )
    shards = [shard for line in lines for shard in _resolve(line, allow_commands)]
    if not shards:
        raise UserError(f"The list {path} names no shards; write one path, pattern or URL on each line.")
    return shards


def _urls(pattern: str) -> list[str]:
    names = _braces(pattern)
    if pattern.startswith(_COMMAND):
        return names
    return [url for name in names for url in (_remote_glob(name) if _GLOB.search(name) else [name])]


def _remote_glob(pattern: str) -> list[str]:
    fs, path = _file_system(pattern)
    try:
        found = sorted(str(match) for match in fs.glob(path))
    except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
        raise UserError(
            f"{pattern} cannot be listed ({type(error).__name__}: {error}); check the address and the access rights."
        ) from error
    if not found:
        raise UserError(f"Nothing matches {pattern}; check the address and the pattern.")
    return [str(fs.unstrip_protocol(match)) for match in found]


def _file_system(url: str) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise UserError(
            f"{url}: {error}; use a path, or a URL that fsspec supports, such as s3:// or https://."
        ) from error
    except ImportError as error:
        raise UserError(f"{url}: {error} (pip install s3fs, gcsfs, huggingface_hub or aiohttp).") from error


def _matches(pattern: str) -> list[str]:
    names = _braces(pattern)
    paths: list[Path] = []
    for name in names:
        found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name]  # noqa: PTH207 - absolute
        paths += map(Path, found)
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


def _braces(pattern: str) -> list[str]:
    sizes = [abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(pattern)]
    if math.prod(sizes) > _MAX_NAMES:
        raise UserError(f"{pattern} has {math.prod(sizes):,} names, more than {_MAX_NAMES:,}; correct the range.")
    try:
        return list(braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"The braces of {pattern} do not match; close every one of them.") from error
