"""Cache remote shards on a node's local disk, shared by its ranks and their loader workers.

The total size is limited. The folder holds

    shards/HASH-NAME     complete shards; the file's modification time is the time of last use
    locks/HASH           locked by the process that fetches the shard; holds why the last fetch failed, as JSON
    reserved/HASH-NAME   sparse files of the size of the shards being fetched, which reserve space
    storage/             what the node's processes know together about the storage: `storage`
    lock                 locked during eviction
    tables/              sample tables of the shards (neuclip_ds/data/node_tables.py)

Locks are the kernel's (flock), so a killed process frees its locks. Its partial files are removed by the next process
that needs the shard or the space. Links are never followed, as a folder may be one that others write to.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from neuclip_ds.data.failures import FailureKind
from neuclip_ds.data.fetch import FetchError, Request, fetch
from neuclip_ds.data.locks import open_lock, open_regular, try_lock
from neuclip_ds.data.node_tables import NodeTables
from neuclip_ds.data.shards import is_local
from neuclip_ds.data.storage import NodePolicy, Storage
from neuclip_ds.errors import UserError

_GB = 1e9
_RETRY_AFTER = 60.0  # seconds before a failed fetch is tried again
_LOCK_TIMEOUTS = 10  # wait this many times `timeout` for other processes
_POLL = 0.05  # seconds
_CHECK = 1.0  # seconds between checks of the storage
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def private_folder() -> Path:
    """Return this user's cache in the folder for temporary files, created if absent.

    Raises:
        UserError: others could have put files there.
    """
    folder = Path(tempfile.gettempdir()) / f"neuclip_ds_shards-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # no folder, as the check finds
    except OSError as error:
        raise UserError(
            f"The shard cache {folder} cannot be created ({error.strerror}); set data.cache_dir."
        ) from error
    status = folder.lstat()
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or writable_by_others:
        raise UserError(f"The shard cache {folder} is not a folder that only you can write to; set data.cache_dir.")
    return folder


class ShardCache:
    """A least-recently-used cache of complete shards, at most `capacity_bytes` in all.

    Args:
        folder: created if absent; private to this node, on a disk that supports flock. Whoever can write to it must be
            trusted with the data.
        capacity_bytes: limit of the total size, shards being fetched included.
        timeout, retries, backoff, min_rate: of a transfer, as in `Request`. Waits for other processes last 10 times as
            long as `timeout` while no shard arrives.
        transfers, max_outage: of the node, as in `Storage`.
        copies_files: whether it also serves shards that are files, for readers of a file system that nodes share.

    Attributes:
        request: what all transfers share.
        storage: what the node's processes know together about the shards' storage.
        tables: sample tables of the shards; their size comes on top of `capacity_bytes`.

    Raises:
        UserError: the folder cannot be created, or its disk is smaller than the capacity.

    Example:
        cache = ShardCache(Path("/local/cache"), capacity_bytes=500 * 10**9)
        path = cache.path("s3://bucket/00000.tar", expected_bytes=461_291_520)
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        timeout: float = 60,
        retries: int = 4,
        backoff: float = 1.0,
        min_rate: float = 0.0,
        transfers: int = 8,
        max_outage: float = 3600,
        copies_files: bool = False,
    ) -> None:
        self.capacity_bytes, self._folder, self._timeout = capacity_bytes, folder, timeout
        self._copies_files = copies_files
        self.request = Request("", None, timeout, retries=retries, backoff=backoff, min_rate=min_rate)
        self.storage = Storage(folder / "storage", transfers, max_outage, timeout)
        self.tables = NodeTables(folder / "tables")
        try:
            for name in ("shards", "locks", "reserved", "storage"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"The shard cache {folder} cannot be created ({error.strerror}); set another data.cache_dir."
            ) from error
        for reservation, _ in _files(folder / "reserved"):
            self._clear_abandoned(reservation)
        status = os.statvfs(folder)
        if capacity_bytes > (disk := status.f_blocks * status.f_frsize):
            raise UserError(
                f"data.cache_gb={capacity_bytes / _GB:g} is more than the disk of {folder} holds "
                f"({disk / _GB:.1f} GB); lower it or set another data.cache_dir."
            )

    def serves(self, url: str) -> bool:
        """Return whether a shard is read from here rather than in place."""
        return self._copies_files or not is_local(url)

    def path(self, url: str, expected_bytes: int, expected_crc32: int | None = None, *, due: bool = True) -> Path:
        """Return the path of the shard's local copy, fetched now if absent; counts as a use.

        The file disappears when the shard is evicted. Readers that have opened it can still read it (POSIX keeps the
        data until the last one closes it); use `open` to open it safely.

        Args:
            due: whether a batch waits for the shard; if not, there is no limit to waiting for the storage.

        Raises:
            OSError: the shard does not exist or is damaged, as found now or within the last minute (it is not fetched
                again before that), or another process has stopped while it held the shard or the space.
            UserError: the storage has refused or failed this node for too long, this machine cannot fetch the shard,
                or it is larger than the whole cache.
        """
        if self.touch(url, expected_bytes):
            return self._shard(url)
        if expected_bytes > self.capacity_bytes:
            raise UserError(
                f"Shard {url} has {expected_bytes / _GB:.2f} GB and does not fit into the cache; "
                f"raise data.cache_gb={self.capacity_bytes / _GB:g}."
            )
        policy, place = NodePolicy(self.storage, due), self._folder / "locks" / _hash(url)
        try:
            with self._locked(place, f"another process that fetches {url}", policy) as lock:
                if not self.touch(url, expected_bytes):  # else another process has fetched it meanwhile
                    request = self.request._replace(url=url, bytes=expected_bytes, crc32=expected_crc32)
                    self._fetch(request, lock, policy)
        except (FetchError, TimeoutError):
            raise
        except OSError as error:
            raise UserError(
                f"The shard cache {self._folder} cannot be used ({error}); give it room and write permission, or set "
                "another data.cache_dir."
            ) from error
        return self._shard(url)

    def open(self, url: str, expected_bytes: int, expected_crc32: int | None = None) -> int:
        """Open the shard's local copy and return its file descriptor, which the caller closes; otherwise as `path`."""
        while True:
            path = self.path(url, expected_bytes, expected_crc32)
            with suppress(FileNotFoundError):  # evicted in between
                return open_regular(path, os.O_RDONLY)

    def arrived(self) -> int:
        """Return the bytes of all shards here, in part or complete: it changes while any process fetches one."""
        with os.scandir(self._folder / "shards") as entries:
            return sum(_size(entry) for entry in entries)

    def waits_for_storage(self) -> bool:
        """Whether this node waits for the storage, which is then the reason why no shard arrives."""
        try:
            return self.storage.read().outage is not None
        except OSError:  # the folder is gone, which those find that use it
            return False

    def touch(self, url: str, expected_bytes: int) -> bool:
        """Mark the shard as used and return True, or return False if no copy of the expected size is cached."""
        shard = self._shard(url)
        try:
            status = shard.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != expected_bytes:
                return False
            os.utime(shard, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _shard(self, url: str) -> Path:
        name = _UNSAFE.sub("_", url.split("?")[0].rstrip("/").rsplit("/", 1)[-1])
        return self._folder / "shards" / f"{_hash(url)}-{name[-60:]}"

    def _fetch(self, request: Request, lock: IO[bytes], policy: NodePolicy) -> None:
        """Reserve space and fetch the shard; the caller holds the shard's lock."""
        assert request.bytes is not None
        if last := _read_failure(lock):
            if abs(time.time() - os.fstat(lock.fileno()).st_mtime) < _RETRY_AFTER:
                raise FetchError(last["error"], FailureKind(last["kind"]))  # again, as all its samples ask for it
            policy.failing_since = last["since"]
            lock.truncate(0)
        touched = os.fstat(lock.fileno()).st_mtime_ns  # again by a batch that waits for the shard
        policy.wanted = lambda: os.fstat(lock.fileno()).st_mtime_ns != touched
        shard = self._shard(request.url)
        self._clear(shard.name)
        self.tables.discard(request.url)
        reservation = self._reserve(shard.name, request.bytes, policy)
        try:
            fetch(request, shard, policy)
        except FetchError as error:
            if error.kind is FailureKind.SETUP:
                raise UserError(f"{str(error).rstrip('.')}; fix this machine or the address.") from error
            failure = {"error": str(error), "kind": error.kind, "since": policy.failing_since}
            lock.truncate(0)
            lock.write(json.dumps(failure).encode())
            lock.flush()
            raise
        else:
            lock.truncate(0)
        finally:
            reservation.unlink(missing_ok=True)

    def _reserve(self, name: str, size: int, policy: NodePolicy) -> Path:
        """Reserve space for a shard, waiting for other transfers where they hold the missing space."""
        reservation = self._folder / "reserved" / name
        waited_for = f"space for {name} in the shard cache {self._folder}; raise data.cache_gb"
        for _ in self._polls(waited_for, policy):
            with self._locked(self._folder / "lock", "another process that evicts shards", policy):
                if self._evict(size):
                    with reservation.open("xb") as file:
                        file.truncate(size)
                    return reservation
        raise AssertionError("unreachable")

    def _evict(self, size: int) -> bool:
        """Evict the least recently used shards until `size` bytes are free, or return False if impossible."""
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
        """Remove a reservation and its partial file if the process that made it has ended."""
        with open_lock(self._folder / "locks" / reservation.name.split("-")[0]) as file:
            if not try_lock(file.fileno()):
                return False
            self._clear(reservation.name)
            fcntl.flock(file, fcntl.LOCK_UN)
            return True

    def _clear(self, name: str) -> None:
        """Remove what an ended process has left of a fetch; the caller holds the shard's lock."""
        for part in (self._folder / "shards").glob(f".{name}.*"):
            part.unlink(missing_ok=True)
        (self._folder / "reserved" / name).unlink(missing_ok=True)

    @contextmanager
    def _locked(self, path: Path, holder: str, policy: NodePolicy) -> Iterator[IO[bytes]]:
        """Hold a lock file during the block; raise TimeoutError if `holder` does not release it in time."""
        with open_lock(path) as file:
            for _ in self._polls(f"{holder} ({path})", policy):
                if try_lock(file.fileno()):
                    break
                if policy.due:
                    os.utime(file.fileno())  # by which the holder knows that a batch waits for the shard
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough when a forked process has the file open too

    def _polls(self, waited_for: str, policy: NodePolicy) -> Iterator[None]:
        """Yield at intervals of 50 ms.

        Raises:
            TimeoutError: no shard has arrived at the node for 10 times `timeout`, for another reason than its storage.
            UserError: the node has waited too long for its storage.
        """
        yield
        limit = self._timeout * _LOCK_TIMEOUTS
        before, end, check = self.arrived(), time.monotonic() + limit, time.monotonic() + _CHECK
        while True:
            time.sleep(_POLL)
            yield
            now = time.monotonic()
            if now >= check:
                policy.check()
                check = now + _CHECK
            if now >= end:
                arrived = self.arrived()
                if arrived == before and not self.waits_for_storage():
                    raise TimeoutError(f"Timed out after {limit:g} s waiting for {waited_for}.")
                before, end = arrived, now + limit


def _hash(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:24]


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of a folder with their status, except hidden ones (partial downloads)."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)


def _read_failure(lock: IO[bytes]) -> dict[str, Any]:
    """Return the last failure to fetch a shard from its lock file; empty if the last fetch was successful."""
    lock.seek(0)
    try:
        found = json.loads(lock.read())
    except ValueError:  # empty, or of another version
        return {}
    return found if isinstance(found, dict) else {}


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:  # evicted or renamed meanwhile
        return 0
