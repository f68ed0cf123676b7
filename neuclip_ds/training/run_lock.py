"""The lock that lets only one launch at a time train in a run's folder."""

import errno
import fcntl
import json
import os
import platform
import struct
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
from neuclip_ds.training.run_folder import RECOVERY

LOCK = "lock.json"
_LOCK_IS_HELD = (errno.EACCES, errno.EAGAIN)
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of Linux
_HEARTBEAT_INTERVAL = 10.0  # seconds between heartbeats
_HEARTBEAT_TIMEOUT = 25.0  # seconds without a heartbeat after which a process on another host is considered dead
_EXIT_TIMEOUT = 5.0  # seconds to wait for the exit of a process on this host that holds the lock


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

    The kernel releases the lock of a process that dies. The lock belongs to the open file, so it is kept if other code
    in this process opens and closes the file, such as a hook that copies the folder. Hosts that share a file system
    might not see each other's locks, so the file's modification time is a heartbeat. After a clean exit, the empty file
    marks a run's folder.
    """
    path = folder / LOCK
    _check_is_run(folder)
    _wait_for_other_hosts(path)
    is_new = not folder.exists()
    with explain_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
    os.register_at_fork(after_in_child=file.close)  # a loader process must not keep the lock after this process
    with file:
        handle = file.fileno()
        _acquire(handle, path)
        ended = threading.Event()
        heartbeat = threading.Thread(target=_send_heartbeats, args=(handle, ended), daemon=True)
        heartbeat.start()
        try:
            yield
        finally:
            ended.set()
            heartbeat.join()
            with suppress(OSError):
                os.ftruncate(handle, 0)
                if is_new and list(folder.iterdir()) == [path]:  # the launch was refused
                    path.unlink()
                    folder.rmdir()


def _check_is_run(folder: Path) -> None:
    """Raise `UserError` if a folder contains files but neither a lock nor a checkpoint."""
    with explain_disk(folder):
        has_files_without_lock = folder.is_dir() and not (folder / LOCK).exists() and any(folder.iterdir())
    if not has_files_without_lock:
        return
    checkpoints = complete_checkpoints(folder / "checkpoints") + complete_checkpoints(folder / RECOVERY / "checkpoints")
    if not checkpoints:
        raise UserError(
            f"{folder} contains files but is not the folder of a run, and training could overwrite them. Choose "
            "another run.name or run.output_dir."
        )


def _acquire(handle: int, path: Path) -> None:
    """Acquire the kernel lock and record this process in the file; wait up to 5 s for a process that is exiting.

    Raises `UserError` if another process still holds the lock, or if the file cannot be written.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT
    while True:
        try:
            _lock_file(handle)
            break
        except OSError as error:
            if error.errno not in _LOCK_IS_HELD:  # a file system without locks
                break
            if time.monotonic() > deadline:
                raise _in_use(path, os.pread(handle, 1000, 0)) from None
            time.sleep(0.2)
    with explain_disk(path):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"host": platform.node(), "pid": os.getpid()}).encode(), 0)


def _lock_file(handle: int) -> None:
    """Lock an open file; raise `OSError` if another process holds a lock, or the file system does not support locks."""
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except OSError as error:
        if error.errno in _LOCK_IS_HELD:
            raise
        # older kernels have only locks that a process loses as soon as any of its code closes the file
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _wait_for_other_hosts(path: Path) -> None:
    """Raise `UserError` if a process on another host updates the file within `_HEARTBEAT_TIMEOUT` seconds."""
    holder, initial_time = _read(path)
    if not holder or _parse(holder).get("host") in (None, platform.node()):
        return
    deadline = time.monotonic() + _HEARTBEAT_TIMEOUT
    while time.monotonic() < deadline:
        time.sleep(_HEARTBEAT_TIMEOUT / 50)
        holder, modification_time = _read(path)
        if holder and modification_time != initial_time:
            raise _in_use(path, holder)


def _read(path: Path) -> tuple[bytes, int]:
    """Return the lock file's content and modification time in nanoseconds; (b"", 0) if the file cannot be read.

    Opening the file makes NFS fetch both from the server.
    """
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return b"", 0


def _parse(holder: bytes) -> dict[str, Any]:
    """Return the host and process that a lock file's content names, or an empty dictionary."""
    try:
        return dict(json.loads(holder))
    except (ValueError, TypeError):
        return {}


def _in_use(path: Path, holder: bytes) -> UserError:
    fields = _parse(holder)
    process = f"process {fields.get('pid', '?')} on {fields.get('host', 'an unknown host')}"
    return UserError(f"{path.parent} is in use by {process}. Wait for that run, stop it, or choose another run.name.")


def _send_heartbeats(handle: int, ended: threading.Event) -> None:
    while not ended.wait(_HEARTBEAT_INTERVAL):
        with suppress(OSError):  # the next update may succeed
            os.utime(handle)
