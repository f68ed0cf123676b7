"""List the files in a folder or those that match a glob; raise an error for folders that cannot be listed.

`pathlib` and `glob` silently ignore such folders. Symlinked folders are followed; hidden files and folders are skipped.
"""

import errno
import glob
import os
from collections.abc import Collection
from pathlib import Path

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")  # extensions of tables of pairs
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")

_NOT_DATA = ("__MACOSX", "lost+found")  # folders that archivers and file systems add


def is_visible(name: str) -> bool:
    """Return whether a file or folder with this name may contain data, unlike `._0.tar` and `__MACOSX`."""
    return not name.startswith(".") and name not in _NOT_DATA


def files_below(folder: Path, extensions: Collection[str]) -> list[Path]:
    """Return the visible files with one of the extensions (lowercase, with the dot) at any depth, sorted by path.

    The files in a symlinked folder are listed once, even if several links lead to it; if the linked folder is itself
    below `folder`, they have their real paths. Raises OSError if a folder cannot be listed.
    """
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()
    pending = [folder]
    while pending:
        links: list[Path] = []  # followed after all real folders, so that files keep their real paths
        for root in pending:
            for parent, folders, names in os.walk(root, onerror=_fail):
                status = Path(parent).stat()
                identity = (status.st_dev, status.st_ino)
                if identity in seen:
                    folders.clear()
                    continue
                seen.add(identity)
                folders[:] = filter(is_visible, folders)
                links += [path for path in (Path(parent, name) for name in folders) if path.is_symlink()]
                for name in filter(is_visible, names):
                    path = Path(parent, name)
                    if path.suffix.lower() in extensions:
                        files.append(path)
        pending = sorted(links)
    return sorted(files)


def matching_files(pattern: str) -> list[str]:
    """Return the sorted paths that match a glob, in which `**` stands for folders at any depth.

    Raises OSError if a folder in which the pattern looks for files or folders cannot be listed.
    """
    folders = pattern
    while glob.has_magic(folders):  # from the deepest folders up to the one that contains the first wildcard
        folders = os.path.dirname(folders)  # noqa: PTH120 - a pattern, not a path
        for folder in glob.iglob(f"{folders}/", recursive=True):  # noqa: PTH207 - absolute
            is_data = is_visible(Path(folder).name)
            if is_data and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
    return sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute


def _fail(error: OSError) -> None:
    raise error
