"""A node's cache of remote shards, shared by its ranks and their loader workers.

On a local disk, within a limit. The folder holds

    shards/HASH-NAME     complete shards; the time of last use is the file's
    locks/HASH           locked by the process that fetches the shard; holds why that failed, if it did
    reserved/HASH-NAME   empty files as long as the shards that are being fetched: room that is spoken for
    lock                 locked while room is made

Locks are the kernel's (flock), so those of a process that is killed are free again. What it had begun is cleared away
by the next one that needs the shard or the room.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from neuclip_ds.data.fetch import fetch
from neuclip_ds.errors import UserError

_GB = 1e9
_FAILURE_HOLDS = 60.0  # seconds for which a failed fetch is not tried again
_PATIENCE = 10  # times `timeout`, for what other processes do
_POLL = 0.05  # seconds
_OTHER_LETTERS = re.compile(r"[^A-Za-z0-9._-]+")


class ShardCache:
    """Complete local copies of shards, at most `capacity_bytes` of them, the least recently used making room.

    Example:
        cache = ShardCache(Path("/local/cache"), capacity_bytes=500 * 10**9)
        path = cache.path("s3://bucket/00000.tar", expected_bytes=461_291_520)
    """

    def __init__(self, folder: Path, capacity_bytes: int, timeout: float = 60, retries: int = 4) -> None:
        """
        Args:
            folder: created if need be; of this node alone, on a disk that knows flock.
            capacity_bytes: limit of the shards' total size, those on their way included.
            timeout, retries: of a transfer, as in `fetch`. Other processes are waited for 10 times as long.

        Raises:
            UserError: the folder cannot be made, or its disk is smaller than the capacity.
        """
        self.capacity_bytes = capacity_bytes
        self._folder, self._timeout, self._retries = folder, timeout, retries
        try:
            for name in ("shards", "locks", "reserved"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The shard cache {folder} cannot be made ({error.strerror}); name another one.") from error
        for reservation, _ in _files(folder / "reserved"):
            self._clear_abandoned(reservation)
        status = os.statvfs(folder)
        if capacity_bytes > (disk := status.f_blocks * status.f_frsize):
            raise UserError(
                f"data.cache_gb={capacity_bytes / _GB:g} is more than the disk of {folder} holds "
                f"({disk / _GB:.1f} GB); lower it or name another folder."
            )

    def path(self, url: str, expected_bytes: int) -> Path:
        """The shard's local copy, fetched now if it is not there; counts as a use.

        The file is gone once others have pushed the shard out. Readers that have opened it before may read on (POSIX
        keeps the data until the last of them closes it); for opening it there is `open`.

        Raises:
            OSError: the fetch failed, now or within the last minute (in which no further try is made), or another
                process held the shard or the room for longer than this one waits.
            UserError: the shard is larger than the whole cache.
        """
        if self.touch(url, expected_bytes):
            return self._shard(url)
        if expected_bytes > self.capacity_bytes:
            raise UserError(
                f"Shard {url} has {expected_bytes / _GB:.2f} GB and does not fit into the cache; "
                f"raise data.cache_gb={self.capacity_bytes / _GB:g}."
            )
        lock = self._folder / "locks" / _hash(url)
        with self._locked(lock, f"another process that fetches {url}"):
            if not self.touch(url, expected_bytes):  # or another process has fetched it meanwhile
                _raise_recent(lock)
                self._fetch(url, expected_bytes, lock)
            return self._shard(url)

    def open(self, url: str, expected_bytes: int) -> int:
        """File descriptor of the shard's local copy, to be closed by the caller; otherwise as `path`."""
        while True:
            path = self.path(url, expected_bytes)
            with suppress(FileNotFoundError):  # pushed out in between
                return os.open(path, os.O_RDONLY)

    def touch(self, url: str, expected_bytes: int) -> bool:
        """Count a use of the shard if its copy is there; a copy of another size is none."""
        shard = self._shard(url)
        try:
            if shard.stat().st_size != expected_bytes:
                return False
            os.utime(shard)
        except FileNotFoundError:
            return False
        return True

    def _shard(self, url: str) -> Path:
        name = _OTHER_LETTERS.sub("_", url.split("?")[0].rstrip("/").rsplit("/", 1)[-1])
        return self._folder / "shards" / f"{_hash(url)}-{name[-60:]}"

    def _fetch(self, url: str, expected_bytes: int, lock: Path) -> None:
        """With the shard's lock held."""
        shard = self._shard(url)
        self._clear(shard.name)
        reservation = self._reserve(shard.name, expected_bytes)
        try:
            fetch(url, shard, expected_bytes=expected_bytes, timeout=self._timeout, retries=self._retries)
        except OSError as error:
            lock.write_text(str(error), encoding="utf-8")
            raise
        else:
            os.truncate(lock, 0)
        finally:
            reservation.unlink(missing_ok=True)

    def _reserve(self, name: str, size: int) -> Path:
        """Make room for a shard and mark it as taken; waits for the transfers that hold what is missing."""
        reservation = self._folder / "reserved" / name
        waited_for = f"room for {name} in the shard cache {self._folder}; raise data.cache_gb"
        for _ in _polls(self._timeout * _PATIENCE, waited_for):
            with self._locked(self._folder / "lock", "another process that makes room"):
                if self._make_room(size):
                    with reservation.open("wb") as file:
                        file.truncate(size)
                    return reservation
        raise AssertionError("unreachable")

    def _make_room(self, size: int) -> bool:
        """Push out the least recently used shards until `size` bytes are free; False, and none, if that is too few."""
        shards = sorted((status.st_mtime_ns, status.st_size, path) for path, status in _files(self._folder / "shards"))
        reserved = [(path, status.st_size) for path, status in _files(self._folder / "reserved")]
        free = self.capacity_bytes - sum(shard[1] for shard in shards) - sum(entry[1] for entry in reserved)
        if free < size:
            free += sum(entry[1] for entry in reserved if self._clear_abandoned(entry[0]))
        if free + sum(shard[1] for shard in shards) < size:
            return False
        for _, length, path in shards:
            if free >= size:
                break
            path.unlink(missing_ok=True)
            free += length
        return True

    def _clear_abandoned(self, reservation: Path) -> bool:
        """Remove a reservation, and what was fetched for it, if the process that made it is no more."""
        with (self._folder / "locks" / reservation.name.split("-")[0]).open("ab") as file:
            if not _try_lock(file.fileno()):
                return False
            self._clear(reservation.name)
            fcntl.flock(file, fcntl.LOCK_UN)
            return True

    def _clear(self, name: str) -> None:
        """Remove what an ended process has left of a fetch; with the shard's lock held."""
        for part in (self._folder / "shards").glob(f".{name}.*"):
            part.unlink(missing_ok=True)
        (self._folder / "reserved" / name).unlink(missing_ok=True)

    @contextmanager
    def _locked(self, path: Path, holder: str) -> Iterator[None]:
        """Hold a lock file; TimeoutError where `holder` does not give it back in time."""
        with path.open("ab") as file:
            for _ in _polls(self._timeout * _PATIENCE, f"{holder} ({path})"):
                if _try_lock(file.fileno()):
                    break
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a forked process has the file, too


def _hash(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:24]


def _raise_recent(lock: Path) -> None:
    """Raise the shard's last failure again while it is fresh: it has many samples, and each of them asks."""
    status = lock.stat()
    if status.st_size and abs(time.time() - status.st_mtime) < _FAILURE_HOLDS:
        raise OSError(lock.read_text(encoding="utf-8"))


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files of a folder with their status; hidden ones (on their way) left out."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _polls(limit: float, waited_for: str) -> Iterator[None]:
    """Turns of waiting, without end but for TimeoutError after `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        yield
        time.sleep(_POLL)
    raise TimeoutError(f"Waited {limit:g} s in vain for {waited_for}.")
