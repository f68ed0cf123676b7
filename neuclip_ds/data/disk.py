"""Errors of the disk as sentences: those that end a start, and those that a run survives."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

_reported: dict[Path, int] = {}


@contextmanager
def explain_disk(path: Path, remedy: str = "choose another --run.folder") -> Iterator[None]:
    """Turn an error of the file system while `path` is written into a `UserError` that ends with `remedy`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}: {error.filename or path}). Make room or give write "
            f"permission there, or {remedy}."
        ) from error


@contextmanager
def best_effort(path: Path) -> Iterator[Path]:
    """Yield a path; log an error of the file system while it is written, and continue without that record.

    The 1st, 2nd, 4th, 8th ... failure of a path is logged.
    """
    try:
        yield path
    except OSError as error:
        _reported[path] = count = _reported.get(path, 0) + 1
        if count & (count - 1) == 0:
            log.warning("%s could not be written (number %d): %s", path, count, error.strerror or error)
