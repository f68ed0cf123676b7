"""Resolve a user's data source to a list of tar files."""

import glob
import math
import re
from pathlib import Path

import fsspec
from braceexpand import braceexpand

from neuclip_ds.data.listing import IMAGES, TABLES, files_below, is_visible, matching_files
from neuclip_ds.errors import UserError, explained, install_command
from neuclip_ds.files import expand_user, read_text

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_GLOB = re.compile(r"[*[]")  # in a URL, ? starts the query
_BETWEEN = "::"
_LIST = ".txt"
_TAR = ".tar"
_RANGE = re.compile(r"\{(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
_MAX_NAMES = 10_000_000


def is_local(path: str) -> bool:
    """Return whether a shard is a file on a local or mounted disk rather than a URL."""
    return not _URL.match(path)


def resolve_shards(source: str) -> list[str]:
    """Return the absolute paths or URLs of the tars that `source` names.

    A source is a tar; a folder, whose visible *.tar files (or, if it has none, those in its subfolders) are sorted by
    path; a glob (`/data/*.tar`); a brace pattern (`/data/{00000..00127}.tar`), whose order is kept and which may
    contain globs; a URL that fsspec supports, with or without globs or braces (`s3://bucket/{00000..00127}.tar`); a
    text file (`shards.txt`) with one source per line, relative to the working directory; or several sources joined by
    `::`.

    Raises UserError if `source` names no tar, names a local tar that does not exist, has braces that do not match,
    combines numeric ranges into more than 10,000,000 names, or cannot be looked up.
    """
    try:
        return _resolve(source)
    except RecursionError as error:
        raise UserError(f"{source[:200]!a} is a list that includes itself; list only shards in it.") from error
    except (OSError, ValueError, RuntimeError) as error:  # impossible name, unknown user, no permission
        raise UserError(f"{source[:200]!a} cannot be looked up ({error}); check the path and permissions.") from error


def _resolve(source: str) -> list[str]:
    if not source.strip():
        raise UserError(
            "A data source is an empty string; pass a tar, a folder of shards, a glob, a brace pattern, a URL or a "
            ".txt list of these."
        )
    if _BETWEEN in source:
        paths: list[str] = []
        for part in source.split(_BETWEEN):
            paths += _resolve(part)
        return paths
    if not is_local(source):
        urls: list[str] = []
        for url in _braces(source):
            urls += _remote_glob(url) if _GLOB.search(url) else [url]
        return urls
    path = Path(expand_user(source))
    if path.is_dir():
        tars = sorted(file for file in path.iterdir() if file.suffix == _TAR and is_visible(file.name))
        tars = tars or files_below(path, [_TAR])
        if not tars:
            raise UserError(_without_shards(path))
        return [str(tar.absolute()) for tar in tars]
    if path.is_file() and path.suffix.lower() in TABLES:
        raise UserError(f"{path} is a table, not shards: {_pack(path, 'it')}.")
    if path.is_file():
        return _listed(path) if path.suffix == _LIST else [str(path.absolute())]
    return _matches(str(path))


def _without_shards(folder: Path) -> str:
    """Return a message about a folder without tars, with advice on the pairs in it."""
    for kind, extensions in {"tables": TABLES, "images": IMAGES}.items():
        if files_below(folder, extensions):
            return f"No *.tar in {folder} or its subfolders; to use the {kind} there, {_pack(folder, 'them')}."
    return f"No *.tar in {folder} or its subfolders; pass the folder that contains the shards."


def _pack(source: Path, pronoun: str) -> str:
    return f"pack {pronoun} into shards (neuclip-ds pack {source} OUT), and pass the folder OUT"


def _listed(path: Path) -> list[str]:
    """Return the shards that the lines of a text file name."""
    shards = []
    for line in map(str.strip, read_text(path).splitlines()):
        if line and not line.startswith("#"):
            for source in line.split(_BETWEEN):
                shards += _resolve(source)
    if not shards:
        raise UserError(f"The list {path} names no shards; write one path, pattern or URL on each line.")
    return shards


def _remote_glob(pattern: str) -> list[str]:
    fix = f"use an address such as s3:// or https://, check the access rights, or run {install_command('remote')}"
    with explained(f"{pattern} cannot be listed", fix):
        fs, path = fsspec.core.url_to_fs(pattern)
        urls = sorted(str(fs.unstrip_protocol(match)) for match in fs.glob(path))
    if not urls:
        raise UserError(f"Nothing matches {pattern}; check the address and the pattern.")
    return urls


def _matches(pattern: str) -> list[str]:
    paths: list[Path] = []
    for name in _braces(pattern):
        if glob.has_magic(name):
            paths += map(Path, matching_files(name))
        else:
            paths.append(Path(name))
    missing = [path for path in paths if not path.exists()]
    if missing:
        count = f" ({len(missing)} of {len(paths)} paths in {pattern} are missing)" if len(paths) > 1 else ""
        raise UserError(f"{missing[0]} does not exist{count}; correct the path.")
    if not paths:
        raise UserError(f"Nothing matches {pattern}; check the folder and the pattern.")
    return [str(path.absolute()) for path in paths]


def _braces(pattern: str) -> list[str]:
    sizes = []
    for first, last, step in _RANGE.findall(pattern):
        sizes.append(abs(int(last) - int(first)) // max(1, abs(int(step or 1))) + 1)
    if math.prod(sizes) > _MAX_NAMES:
        raise UserError(
            f"{pattern} expands to {math.prod(sizes):,} names, but the limit is {_MAX_NAMES:,}; correct the range."
        )
    try:
        return list(braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"The braces of {pattern} do not match; close every brace.") from error
