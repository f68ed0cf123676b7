"""Files of the cache that processes lock, opened without following links."""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import IO

from neuclip_ds.errors import UserError


def open_regular(path: Path, flags: int) -> int:
    """Open a file of the cache; raise UserError for anything that stands for a file elsewhere."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    else:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return fd
        os.close(fd)
    raise UserError(
        f"{path} in the shard cache is a link or no file: remove it, and do not share the cache with others."
    )


def open_lock(path: Path) -> IO[bytes]:
    """Open a file to lock, created if absent; raise UserError for a link."""
    return os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")


def try_lock(fd: int) -> bool:
    """Lock an open file if it is free; the kernel frees it when the process ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
