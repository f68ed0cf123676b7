"""Write a file or folder atomically: readers see all of it or nothing. What killed writers have left is removed."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from neuclip_ds.errors import UserError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it replaces `path` when the block succeeds."""
    remove_abandoned(path.parent.glob(f".{path.name}.[0-9]*"))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch()
        with claimed(temporary):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which takes the name `folder` when the block succeeds and vanishes on an error.

    Raises:
        UserError: `folder` is a file, is not empty or cannot be written.
    """
    check_unused(folder)
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.partial")
    try:
        remove_abandoned(folder.parent.glob(f".{folder.name}.*.partial"))
        temporary.mkdir(parents=True)
        with claimed(temporary):
            yield temporary
            temporary.rename(folder)  # replaces an empty folder and refuses any other
    except OSError as error:
        check_unused(folder)
        raise UserError(f"{folder} cannot be written ({error}); choose another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # absent after success


def check_unused(folder: Path) -> None:
    """Raise `UserError` unless a path is absent or an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already and is not an empty folder; remove it or name another one.")


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Hold the kernel's lock of a file or folder during the block, which yields whether it was free.

    A killed process loses its locks. On a file system without locks nothing is ever free.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove temporary files and folders that no living process has claimed."""
    for path in paths:
        with suppress(OSError), claimed(path) as free:  # another process may remove it at the same time
            if free and path.is_dir():
                shutil.rmtree(path)
            elif free:
                path.unlink()
