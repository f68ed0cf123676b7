"""Write files atomically, and detect changed files with checksums.

The checksum is CRC-32, which detects every single-bit error and every burst of up to 32 bits, but not tampering.
On one core of an AMD EPYC, zlib computes CRC-32 at 2.1 GB/s, and hashlib computes SHA-256 at 1.1 GB/s (2026-11-22).
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple
from uuid import uuid4

from safetensors import SafetensorError

from neuclip_ds.errors import UserError, counted, is_power_of_two
from neuclip_ds.limits import fix_of_limit

log = logging.getLogger(__name__)

_CHUNK = 16 << 20
_BETWEEN_PATHS = "::"  # between the paths of a source of pairs, as in `data.train`
FIX_OF_CACHE = "set data.cache_dir, --cache-dir or TMPDIR to another folder"
_failures: dict[Path, int] = {}  # how often each path given to `best_effort` could not be written


def expand_user(path: str) -> str:
    """Return a path, or several paths joined by ::, with `~` and `~USER` replaced by home folders.

    URLs are unchanged, and so is the path of an unknown user, for which `Path.expanduser` would raise RuntimeError.
    """
    return _BETWEEN_PATHS.join(map(os.path.expanduser, path.split(_BETWEEN_PATHS)))


def exists(path: Path | str) -> bool:
    """Return whether a path exists; False, instead of the OSError of `Path.exists`, if a name in it is too long."""
    try:
        return Path(path).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


class Checksum(NamedTuple):
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


class ChecksumWriter:
    """Writer for a binary file that updates `checksum` with everything that is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.checksum = Checksum(0, 0)

    def write(self, data: Any) -> None:
        """Write a contiguous buffer of bytes."""
        self._file.write(data)
        size = self.checksum.bytes + len(data)
        crc32 = zlib.crc32(data, self.checksum.crc32)
        self.checksum = Checksum(size, crc32)


def checksum_of(path: Path) -> Checksum:
    """Read a file and return its checksum; raise OSError if the file cannot be read."""
    size = 0
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return Checksum(size, crc32)


def seen_from_here(path: Path) -> Path:
    """Return a path for messages: relative to the working directory if the path is inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path`; it replaces `path` if the block succeeds, and is removed otherwise."""
    _remove_abandoned(path.parent, rf"\.{re.escape(path.name)}\.\d+")
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
    """Yield a temporary folder, which is renamed to `folder` if the block succeeds and deleted if it fails.

    Raises:
        UserError: `folder` is a file, is not empty or cannot be written.
    """
    check_unused(folder)
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.partial")
    try:
        _remove_abandoned(folder.parent, rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.partial")
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
    """Raise `UserError` if the path exists and is not an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already and is not an empty folder; remove it, or choose another folder.")


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to hold a kernel lock on a file or folder during the block, and yield whether the lock was free.

    A killed process loses its locks. On a file system that does not support locks, `claimed` never yields True.
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


def _remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove temporary files and folders left by killed writers, that is, those that no live process has claimed.

    Only files and folders in `folder` whose whole name matches the regular expression `pattern` are removed.
    """
    for path in folder.glob("*"):
        if not re.fullmatch(pattern, path.name):
            continue
        with suppress(OSError), claimed(path) as is_free:  # another process may remove it at the same time
            if not is_free:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def sync(path: Path, forget: bool = False) -> None:
    """Flush a file, or the entries of a folder, to disk, so that the data survives a power failure.

    If `forget` is true, also drop the file from the page cache, so that the next read comes from the disk.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if forget:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def sync_folders(folder: Path) -> None:
    """Flush the entries of a folder and its subfolders to disk."""
    sync(folder)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)


def link_or_copy(source: str, target: str) -> None:
    """Create a hard link to a file, or copy it if that fails, for example between file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def read_text(path: Path) -> str:
    """Return the text of a file that a user wrote, without a byte order mark.

    Raises UserError if the text is not UTF-8, or OSError if the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {error.start}); save it as "
            "UTF-8."
        ) from error


def json_lines(path: Path) -> list[Any]:
    """Return the records of a JSON Lines file; first remove a last line without a newline, left by a killed program.

    Raises OSError if the file cannot be read or truncated, and ValueError if a complete line is not JSON.
    """
    text = path.read_bytes()
    complete_lines = text[: text.rfind(b"\n") + 1]
    os.truncate(path, len(complete_lines))
    return [json.loads(line) for line in complete_lines.splitlines()]


def records(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, record) for each line of a JSON Lines file that is an object with an integer under `key`.

    Other lines, which a crash or an editor may leave, are skipped with one warning. A partial last line, which a killed
    program leaves, is skipped without a warning.
    """
    skipped = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and type(record.get(key)) is int:
                yield line.rstrip("\n") + "\n", record
            elif line.endswith("\n"):
                skipped.append(number)
    if skipped:
        log.warning(
            "%s: skipped %s with an integer %r; the first is line %d",
            path,
            counted(len(skipped), "line that is not a JSON object", "lines that are not JSON objects"),
            key,
            skipped[0],
        )


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines of JSON to a file.

    A killed program may have left a last line without a newline: this line is kept if it is valid JSON, and removed
    otherwise. If writing fails, for example because the disk is full, the part that was written is removed, and
    `OSError` is raised.
    """
    text = "".join(f"{line}\n" for line in lines)
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        if size and file.read(1) != b"\n":
            content = path.read_bytes()
            last_line = content[content.rfind(b"\n") + 1 :]
            try:
                json.loads(last_line)
                text = f"\n{text}"  # only the end of the line is missing
            except ValueError:
                size -= len(last_line)
                file.truncate(size)
        data = text.encode()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


@contextmanager
def safetensors_as_os_error() -> Iterator[None]:
    """Turn a `SafetensorError`, which safetensors raises if it cannot write a file, into an `OSError`."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


@contextmanager
def explain_disk(path: Path, remedy: str = "choose another run.output_dir") -> Iterator[None]:
    """Turn a file-system error that occurs while writing `path` into a `UserError` that ends with `remedy`.

    If the error reports a limit of this machine, such as the number of open files, the `UserError` ends with advice on
    this limit instead.
    """
    try:
        yield
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror or error}: {error.filename or path})"
        if fix := fix_of_limit(error):
            raise UserError(f"{problem}; {fix}.") from error
        raise UserError(f"{problem}. Make room or give write permission there, or {remedy}.") from error


def private_folder(fix: str = FIX_OF_CACHE) -> Path:
    """Return this user's shard cache in the system's temporary folder; create the cache if it does not exist.

    Raises:
        UserError: the folder cannot be created, or the path is not a folder that only this user owns and can write to;
            the message ends with `fix`.
    """
    folder = Path(tempfile.gettempdir()) / f"neuclip_ds_shards-{os.getuid()}"
    with explain_disk(folder, fix), suppress(FileExistsError):  # the check below reports it
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or writable_by_others:
        raise UserError(f"The shard cache {folder} is not a folder that only you can write to; {fix}.")
    return folder


@contextmanager
def best_effort(path: Path) -> Iterator[Path]:
    """Yield `path` for writing; if a file-system error ends the block, log the error instead of raising it.

    For each path, only the 1st, 2nd, 4th, 8th, ... failure is logged.
    """
    try:
        yield path
    except OSError as error:
        count = _failures.get(path, 0) + 1
        _failures[path] = count
        if is_power_of_two(count):
            reason = error.strerror or error
            log.warning(
                "%s could not be written: %s (failed attempts so far: %d). The program continues, but this output may "
                "be incomplete; check the disk",
                path,
                reason,
                count,
            )
