"""Write a file atomically: readers see the whole new file or none of it. What killed writers have left is removed."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it replaces `path` when the block succeeds."""
    remove_abandoned(path.parent.glob(f".{path.name}.*"))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch()
        with claimed(temporary):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
