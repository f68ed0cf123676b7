"""Write the files of a checkpoint so that they survive a power cut, and read them back."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from neuclip_ds.checkpoint.integrity import DamagedCheckpoint, verify_file
from neuclip_ds.checksum import Checksum
from neuclip_ds.errors import UserError
from neuclip_ds.state.tensor_file import StateFile


class SaveFailed(UserError):
    """A checkpoint could not be written, on any rank; what was written of it is removed."""


@contextmanager
def explain_failure(folder: Path) -> Iterator[None]:
    """Turn an error of the file system, or of what was read back, into `SaveFailed`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise SaveFailed(f"{folder} could not be written: {reason} ({error.filename or folder}).") from error
    except DamagedCheckpoint as error:
        raise SaveFailed(f"{folder} could not be written: {error}") from error


def write_files(folder: Path, files: Sequence[StateFile]) -> dict[str, Checksum]:
    """Write files, force them to disk, read them back from there and return their checksums by name.

    Raises `SaveFailed`.
    """
    written: dict[str, Checksum] = {}
    with explain_failure(folder):
        for file in files:
            written[file.name] = file.write(folder)
            _sync_and_forget(folder / file.name)
        for name, checksum in written.items():
            verify_file(folder / name, checksum)
    return written


def sync_folders(folder: Path) -> None:
    """Force the names of the files in a folder and in those below it to disk."""
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        with _opened(place) as handle:
            os.fsync(handle)


def _sync_and_forget(path: Path) -> None:
    """Force a file to disk, and drop it from the page cache, so that reading it back reads the disk."""
    with _opened(path) as handle:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
