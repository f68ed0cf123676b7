"""Tell whether a checkpoint's files are as they were written.

meta.json lists size and CRC-32 of every other file, and holds the CRC-32 of its own content. Checkpoints of format 2
have no checksums: of those only the structure of the files is checked.
"""

import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from neuclip_ds.checksum import Checksum, checksum_of
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

META = "meta.json"
FORMAT = 3  # 1 held DeepSpeed's own files, 2 no checksums
_UNSEALED = 2
_SEAL = "crc32"
_RENAMED = {"slots": "shard_streams"}  # in facts of checkpoints written before the name changed
_FIX = "Restore the file, or delete the folder of this checkpoint to use an older one"


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, or is not as it was written; the message names it."""


def is_complete(path: Path) -> bool:
    """Return whether a folder is a checkpoint."""
    return (path / META).is_file()


def seal(content: Mapping[str, Any]) -> str:
    """Return a JSON text that holds the CRC-32 of its content."""
    crc32 = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, _SEAL: crc32}, indent=2)


def read_sealed(path: Path) -> tuple[dict[str, Any], bool]:
    """Read what `seal` returned, or a JSON object without a seal; return it and whether it has one.

    Raises `DamagedCheckpoint` if it is missing or has changed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing. {_FIX}.") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({error}). {_FIX}.") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path} is damaged (it holds no object). {_FIX}.")
    sealed = content.pop(_SEAL, None) is not None
    if sealed and text != seal(content):
        raise DamagedCheckpoint(f"{path} is damaged (its checksum differs). {_FIX}.")
    return content, sealed


def read_meta(path: Path) -> dict[str, Any]:
    """Read meta.json of a checkpoint: `step`, `facts`, `data` and, unless it is of format 2, `files`.

    Raises `DamagedCheckpoint`, or `UserError` if it has another format.
    """
    meta, sealed = read_sealed(path / META)
    found = meta.get("format")
    if (found == FORMAT and not sealed) or (found == _UNSEALED and (sealed or "files" in meta)):
        raise DamagedCheckpoint(f"{path / META} is damaged (it has no checksum). {_FIX}.")
    if found not in (FORMAT, _UNSEALED):
        raise UserError(
            f"The checkpoint {path} was written in format {found}, this version reads {FORMAT}. "
            "Finish the run with the version that wrote it, or start a new run under another --run.name."
        )
    meta["facts"] = {_RENAMED.get(name, name): value for name, value in meta["facts"].items()}
    if isinstance(sources := meta["facts"].get("sources"), dict):  # by name, before they were a list
        meta["facts"]["sources"] = list(sources.values())
    return meta


def verify(path: Path, rank: int = 0, world_size: int = 1, inside: str = "") -> None:
    """Read a rank's share of a checkpoint's files; raise `DamagedCheckpoint` where one is not as it was written.

    `inside` limits it to the files whose names begin so, such as `engine/`.
    """
    meta = read_meta(path)
    if meta["format"] == _UNSEALED:
        if rank == 0:
            log.info("%s is of an earlier version, without checksums", path)
            _check_structure(path)
        return
    files = {name: Checksum(*found) for name, found in meta["files"].items()}
    chosen = [name for name in files if name.startswith(inside)]
    by_size = sorted(chosen, key=lambda name: (files[name].bytes, name))
    for name in by_size[rank::world_size]:
        verify_file(path / name, files[name])


def verify_file(path: Path, written: Checksum) -> None:
    """Raise `DamagedCheckpoint` unless a file is as it was written."""
    try:
        found = checksum_of(path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing. {_FIX}.") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}). {_FIX}.") from error
    if found.bytes != written.bytes:
        raise DamagedCheckpoint(f"{path} has {found.bytes} bytes instead of {written.bytes}. {_FIX}.")
    if found != written:
        raise DamagedCheckpoint(f"{path} is damaged (its checksum differs). {_FIX}.")


def _check_structure(path: Path) -> None:
    files = [file for file in path.rglob("*.safetensors") if file.is_file()]
    for file in [path / "objective.safetensors", *files]:
        try:
            safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{file} is damaged or missing ({error}). {_FIX}.") from error
