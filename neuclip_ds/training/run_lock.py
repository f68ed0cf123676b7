"""The lock that lets only one launch at a time train in a run's folder."""

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.files import explain_disk
from neuclip_ds.training.recovery import RECOVERY

LOCK = "lock.json"
_HELD = (errno.EACCES, errno.EAGAIN)
_BEAT = 10.0  # seconds between heartbeats
_SILENCE = 25.0  # seconds without a heartbeat after which a process on another host is considered dead
_ENDING = 5.0  # seconds that a stopped process has to exit


@contextmanager
def locked(folder: Path, communicator: Communicator) -> Iterator[None]:
    """Hold the lock on a run's folder, on rank 0, during the `with` block; all ranks enter the block together.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written or does not belong to a run.
    """
    with ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(_lock(folder))

        communicator.on_rank_zero(enter)
        yield


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a kernel lock on FOLDER/lock.json, and record this host and process in the file.

    The kernel releases the lock of a process that dies. Hosts that share a file system might not see each other's
    locks, so the file's modification time is a heartbeat. After a clean exit, the empty file marks a run's folder.
    """
    path, ended = folder / LOCK, threading.Event()
    _check_is_run(folder)
    _wait_for_other_hosts(path)
    is_new = not folder.exists()
    with explain_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take(handle, path)
        beats = threading.Thread(target=_beat, args=(handle, ended), daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            with suppress(OSError):
                os.ftruncate(handle, 0)
                if is_new and list(folder.iterdir()) == [path]:  # the launch was refused
                    path.unlink()
                    folder.rmdir()
    finally:
        os.close(handle)


def _check_is_run(folder: Path) -> None:
    """Raise `UserError` if a folder contains files but neither a lock nor a checkpoint."""
    with explain_disk(folder):
        foreign = folder.is_dir() and not (folder / LOCK).exists() and any(folder.iterdir())
    if foreign and not any(complete_checkpoints(at / "checkpoints") for at in (folder, folder / RECOVERY)):
        raise UserError(
            f"{folder} has files but is not the folder of a run, and training could overwrite them. Choose another "
            "--run.name or --run.output-dir."
        )


def _take(handle: int, path: Path) -> None:
    """Acquire the kernel lock and record this process in the file; wait briefly for a process that is exiting."""
    deadline = time.monotonic() + _ENDING
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # loader processes would inherit a flock, but not this
            break
        except OSError as error:
            if error.errno not in _HELD:  # a file system without locks
                break
            if time.monotonic() > deadline:
                raise _in_use(path, os.pread(handle, 1000, 0)) from None
            time.sleep(0.2)
    with explain_disk(path):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": platform.node(), "pid": os.getpid()}).encode(), 0)


def _wait_for_other_hosts(path: Path) -> None:
    """Raise `UserError` if a process on another host updates the file within `_SILENCE` seconds."""
    holder, first = _read(path)
    if not holder or _parse(holder).get("host") in (None, platform.node()):
        return
    deadline = time.monotonic() + _SILENCE
    while time.monotonic() < deadline:
        time.sleep(_SILENCE / 50)
        holder, changed = _read(path)
        if holder and changed != first:
            raise _in_use(path, holder)


def _read(path: Path) -> tuple[bytes, int]:
    """Return the lock file's content and modification time; opening the file makes NFS fetch both from the server."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return b"", 0


def _parse(holder: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(holder))
    except (ValueError, TypeError):
        return {}


def _in_use(path: Path, holder: bytes) -> UserError:
    known = _parse(holder)
    where = f"process {known.get('pid', '?')} on {known.get('host', 'an unknown host')}"
    return UserError(f"{path.parent} is in use by {where}. Wait for that run, stop it, or choose another --run.name.")


def _beat(handle: int, ended: threading.Event) -> None:
    while not ended.wait(_BEAT):
        with suppress(OSError):  # the next update may succeed
            os.utime(handle)
