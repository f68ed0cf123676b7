"""Write a checkpoint's files so that they survive a power failure, and verify their checksums.

meta.json lists the size and CRC-32 of every other file and also contains the CRC-32 of its own content.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuclip_ds.errors import UserError
from neuclip_ds.files import Checksum, checksum_of, sync
from neuclip_ds.state.tensor_file import StateFile

META = "meta.json"
_FIX = "Restore the file, or delete the folder of this checkpoint to use an older one"


class DamagedCheckpoint(UserError):
    """A checkpoint file is missing or has changed since it was written; the message names the file."""


class SaveFailed(UserError):
    """A checkpoint, or the record of the best evaluation, could not be written; a partial checkpoint is removed."""


@contextmanager
def explain_failure(folder: Path) -> Iterator[None]:
    """If the block raises `OSError` or `DamagedCheckpoint`, raise `SaveFailed` instead."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise SaveFailed(f"{folder} could not be written: {reason} ({error.filename or folder}).") from error
    except DamagedCheckpoint as error:
        raise SaveFailed(f"{folder} could not be written: {problem_of(error)}") from error


def write_files(folder: Path, files: Sequence[StateFile]) -> dict[str, Checksum]:
    """Write files, sync them, read them back from the disk and return their checksums by name.

    Raises `SaveFailed` if a file cannot be written or if the content read back differs from what was written.
    """
    written: dict[str, Checksum] = {}
    with explain_failure(folder):
        for file in files:
            written[file.name] = file.write(folder)
            sync(folder / file.name, forget=True)
        for name, checksum in written.items():
            verify_file(folder / name, checksum)
    return written


def is_complete(path: Path) -> bool:
    """Return whether a folder contains meta.json, the last file of a checkpoint to be written, without verifying it."""
    return (path / META).is_file()


def sealed(content: Mapping[str, Any]) -> str:
    """Return the content as JSON text with the content's CRC-32 added."""
    crc32 = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, "crc32": crc32}, indent=2)


def read_sealed(path: Path, fix: str = _FIX) -> dict[str, Any]:
    """Read the content of a file written with `sealed`.

    Raises `DamagedCheckpoint`, whose message ends with `fix`, if the file is missing or damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({error}). {fix}.") from error
    if not isinstance(content, dict) or content.pop("crc32", None) is None or text != sealed(content):
        raise DamagedCheckpoint(f"{path} is damaged (its checksum differs). {fix}.")
    return content


def problem_of(error: Exception) -> str:
    """Return an error's message without the advice of `DamagedCheckpoint`, for callers that try another checkpoint."""
    return str(error).removesuffix(f" {_FIX}.")


def read_meta(path: Path) -> dict[str, Any]:
    """Read a checkpoint's meta.json (`step`, `facts`, `data`, `files`).

    Raises `DamagedCheckpoint` if the file is missing or damaged.
    """
    meta = read_sealed(path / META)
    if not isinstance(meta.get("files"), dict):
        raise DamagedCheckpoint(f"{path / META} is damaged (it lists no files). {_FIX}.")
    return meta


def verify(path: Path, rank: int = 0, world_size: int = 1) -> None:
    """Verify a rank's share of a checkpoint's files; raise `DamagedCheckpoint` if any of them is missing or damaged."""
    files = read_meta(path)["files"]
    checksums = sorted((Checksum(*fields), name) for name, fields in files.items())  # by size, to share them evenly
    for checksum, name in checksums[rank::world_size]:
        verify_file(path / name, checksum)


def verify_file(path: Path, written: Checksum) -> None:
    """Raise `DamagedCheckpoint` if a file is unreadable or does not match the checksum computed when it was written."""
    try:
        actual = checksum_of(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}). {_FIX}.") from error
    if actual != written:
        size = ""
        if actual.bytes != written.bytes:
            size = f", {actual.bytes} bytes instead of {written.bytes}"
        raise DamagedCheckpoint(f"{path} is damaged (its checksum differs{size}). {_FIX}.")
