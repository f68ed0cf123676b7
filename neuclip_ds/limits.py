"""Limits of the machine that loader processes may reach: open files, shared memory, and the length of TMPDIR's path."""

import errno
import os
import resource
import tempfile
from pathlib import Path
from shutil import disk_usage

SHARED_MEMORY = Path("/dev/shm")  # torch shares tensors between processes here
# on a CPU, each rank opens 79 files if there are two ranks, and more if there are more; a loader process opens 38
_FEWEST_FILES = 256
_LONGEST_SOCKET = 107  # bytes of the path of a Unix socket (sun_path in sys/un.h, without the final zero)
_SOCKET = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # below TMPDIR, as multiprocessing names its sockets
# parts of error messages from torch and multiprocessing, for errors that have no errno
_FULL = "unable to allocate shared memory"
_TOO_MANY_FILES = ("Too many open files", "items of ancdata")  # the second: no descriptor was left to receive one
_LONG_PATH = "AF_UNIX path too long"
_FIX_OF_SOCKETS = (
    f"set TMPDIR to a folder whose path has at most {_LONGEST_SOCKET - len(_SOCKET)} bytes, such as /tmp, because "
    "loader processes create sockets in it"
)


def open_files() -> int:
    """Return how many files this process may have open (ulimit -n); 2**30 if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def fix_of_limit(error: BaseException) -> str:
    """Return advice on the limit that an error reports, as the end of a sentence, or "" if the error reports none."""
    text = str(error)
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or any(sign in text for sign in _TOO_MANY_FILES):
        return _fix_of_open_files()
    if _FULL in text:
        return fix_of_shared_memory()
    if _LONG_PATH in text:
        return _FIX_OF_SOCKETS
    return ""


def fix_of_shared_memory() -> str:
    """Return advice on enlarging shared memory, with its free and total size."""
    size = ""
    if SHARED_MEMORY.is_dir():  # some systems have shared memory elsewhere
        usage = disk_usage(SHARED_MEMORY)
        size = f" ({usage.free / 1e9:,.2f} of {usage.total / 1e9:,.2f} GB is free)"
    return (
        f"{SHARED_MEMORY} is too small{size}: start the container with a larger --shm-size (`neuclip-ds train "
        "--dry-run` prints the size that a run needs), or lower data.workers (or --workers) or data.prefetch"
    )


def shared_memory_shortage(needed: int) -> str | None:
    """Return a message with a fix if shared memory has fewer than `needed` bytes free, otherwise None."""
    if not SHARED_MEMORY.is_dir() or disk_usage(SHARED_MEMORY).free >= needed:
        return None
    need = f"This node's loader processes need up to {needed / 1e9:,.2f} GB of shared memory (computed)"
    return f"{need}, but {fix_of_shared_memory()}."


def low_limit() -> str | None:
    """Return a message with a fix if loader processes need a higher limit on open files or a shorter path in TMPDIR.

    Returns None otherwise; `shared_memory_shortage` checks shared memory.
    """
    if open_files() < _FEWEST_FILES:
        return f"Loader processes need {_FEWEST_FILES} open files: {_fix_of_open_files()}."
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder + _SOCKET)) > _LONGEST_SOCKET:
        return f"The path of the temporary folder {folder} is too long: {_FIX_OF_SOCKETS}."
    return None


def _fix_of_open_files() -> str:
    return (
        f"raise the limit on open files, which is {open_files()}, for example with `ulimit -n 4096` (in a container, "
        "--ulimit nofile=65536)"
    )
