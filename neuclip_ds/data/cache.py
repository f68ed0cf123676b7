"""Cache remote shards and feature files on a node's local disk, for all ranks and loader workers on the node.

The total size is limited. Feature files are cached in the same way as shards. The folder contains:

    shards/HASH-NAME      a complete shard; its modification time is the time of its last use
    fetching/HASH-BYTES/  partial files of a shard that is being fetched, as a whole or in pieces
                          (neuclip_ds/data/partial_shard.py); BYTES of the cache are reserved for it
    locks/HASH            locked by the process that is fetching the shard
    failed/HASH           the reason why the shard could not be fetched, as JSON
    outage                the node waits for its storage until this file's modification time
    lock                  locked while space is being reserved
    tables/               sample tables of the shards (neuclip_ds/data/node_tables.py)

The locks are kernel locks (flock), which are released if a process is killed. The next process that needs the
shard or the space removes the killed process's partial files.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from io import FileIO
from pathlib import Path

from filelock import FileLock, Timeout

from neuclip_ds.data.fetch import AttemptFailed, FetchError, Retries, attempt
from neuclip_ds.data.node_tables import NodeTables, files_in, name_of, remove_oldest
from neuclip_ds.data.partial_shard import ARRIVED, DATA, PartialShard, has_arrived
from neuclip_ds.distributed.stop_signals import raising_at_once
from neuclip_ds.errors import UserError
from neuclip_ds.files import FIX_OF_CACHE, checksum_of, explain_disk
from neuclip_ds.limits import fix_of_limit

log = logging.getLogger(__name__)

_RETRY_AFTER = 60.0  # seconds after which a shard that could not be fetched is tried again
_POLL = 0.05  # seconds
_POLL_PIECES = 0.005  # seconds between checks for the pieces of a shard
_POLL_OWNER = 1.0  # seconds between checks of whether the process that fetches a shard in pieces still runs
_RESERVED = re.compile(r"[0-9a-f]{24}-\d+")  # name of a folder in fetching/: HASH-BYTES
_BLOCK_OF_STAT = 512  # bytes, the unit of `st_blocks`


class ShardCache:
    """A least-recently-used cache of complete shards and feature files.

    Raises UserError if the folder cannot be created, or if its disk is smaller than `capacity_bytes`.

    Args:
        folder: a folder that only this node uses, on a disk that supports flock. Anyone who can write to the folder can
            change the data.
        capacity_bytes: the limit on the total size of complete and partial shards, excluding the sample `tables`.
        timeout: the number of seconds without new data after which an attempt to fetch a shard fails.
        max_outage: the maximum number of seconds that a reader waits for failed storage to recover.
        downloads: the maximum number of concurrent prefetches on the node.
        backoff: the maximum number of seconds between the first two attempts to fetch a shard.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        timeout: float = 60,
        max_outage: float = 3600,
        downloads: int = 8,
        backoff: float = 1.0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.downloads = downloads
        self.timeout = timeout
        self.tables = NodeTables(folder / "tables")
        self._folder = folder
        self._max_outage = max_outage
        self._backoff = backoff
        self._begun: set[str] = set()  # names of the shards that this process fetches in pieces
        with explain_disk(folder, FIX_OF_CACHE):
            for name in ("shards", "fetching", "locks", "failed"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        status = os.statvfs(folder)
        disk_bytes = status.f_blocks * status.f_frsize
        if capacity_bytes > disk_bytes:
            raise UserError(
                f"data.cache_gb={capacity_bytes / 1e9:g} is more than the disk of {folder} holds "
                f"({disk_bytes / 1e9:.1f} GB): lower data.cache_gb (or --cache-gb), or set data.cache_dir, --cache-dir "
                "or TMPDIR to a folder on a larger disk."
            )

    def path(self, url: str, expected_bytes: int, expected_crc32: int | None = None) -> Path:
        """Fetch a shard if it is not cached, mark it as used, and return its path, which is valid until eviction.

        Args:
            url: the URL of the shard.
            expected_bytes: the size of the shard; a cached copy of a different size is fetched again.
            expected_crc32: the checksum that a fetched shard must have; None if it is not known.

        Raises:
            FetchError: attempts to fetch the shard, now or in the last minute, found it missing or damaged, or reached
                a limit of this machine.
            UserError: the storage refuses access or has failed for too long, the address is invalid or its backend is
                not installed, the shard is larger than the whole cache, or the cache folder cannot be used.
        """
        if expected_bytes > self.capacity_bytes:
            raise UserError(
                f"{url} takes {expected_bytes / 1e9:.3g} GB and does not fit into the cache of "
                f"{self.capacity_bytes / 1e9:g} GB: raise data.cache_gb (or --cache-gb)."
            )
        retries = Retries(url, self._max_outage, self._backoff)
        try:
            while not self.touch(url, expected_bytes):
                pause = self._try_to_fetch(url, expected_bytes, expected_crc32, retries)
                _wait(pause)
        except FetchError:
            raise
        except OSError as error:
            fix = fix_of_limit(error) or f"make room or give write permission there, or {FIX_OF_CACHE}"
            raise UserError(f"The shard cache {self._folder} cannot be used ({error}); {fix}.") from error
        return self._shard(url)

    def open(self, url: str, expected_bytes: int, expected_crc32: int | None = None) -> FileIO:
        """Open a shard's local copy, which is fetched if necessary; the open file stays readable after an eviction.

        Raises the same errors as `path`, or OSError if the copy cannot be opened.
        """
        while True:
            with suppress(FileNotFoundError):  # evicted before it was opened
                return FileIO(self.path(url, expected_bytes, expected_crc32))

    def open_arrived(self, url: str, expected_bytes: int, extents: Iterable[tuple[int, int]]) -> FileIO | None:
        """Open the local copy of a shard that is being fetched in pieces, once the given extents have arrived.

        `extents` are (offset, size) pairs; other bytes may still be missing from the file. Returns None if no process
        is fetching the shard in pieces, for example because it is complete.
        """
        extents = list(extents)
        name = name_of(url)
        folder = self._folder / "fetching" / f"{name}-{expected_bytes}"
        next_check = time.monotonic() + _POLL_OWNER
        with suppress(FileNotFoundError), FileIO(folder / ARRIVED) as arrived:
            while not has_arrived(arrived.fileno(), extents):
                if not os.fstat(arrived.fileno()).st_nlink:  # removed, because the shard could not be fetched in pieces
                    return None
                if time.monotonic() > next_check:
                    next_check += _POLL_OWNER
                    with suppress(Timeout), FileLock(self._folder / "locks" / name, blocking=False):
                        return None  # the process that fetched the shard has ended
                with raising_at_once():
                    time.sleep(_POLL_PIECES)
            return FileIO(folder / DATA)
        return None

    def begin(self, url: str, size: int) -> PartialShard | None:
        """Begin to fetch a shard in pieces; the caller must later call `complete` or `abandon`.

        Returns None if the shard is cached, has recently failed or is being fetched, or if space is short. Raises
        OSError if the files cannot be created.
        """
        name = name_of(url)
        lock = FileLock(self._folder / "locks" / name, blocking=False, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            return None
        has_failed = time.time() - _modified(self._folder / "failed" / name) < _RETRY_AFTER
        folder = None
        if size <= self.capacity_bytes and not has_failed and not self.touch(url, size):
            folder = self._reserve(name, size)
        if folder is None:
            lock.release()
            return None
        shard = PartialShard(url, size, folder, lock)
        self._begun.add(name)
        return shard

    def complete(self, shard: PartialShard, expected_crc32: int | None = None) -> bool:
        """Move a shard whose pieces have all arrived into the cache; if its checksum differs, abandon it.

        `expected_crc32` is the checksum; None if it is not known. Returns whether the shard is now in the cache.
        """
        data = shard.folder / DATA
        is_intact = expected_crc32 is None or checksum_of(data).crc32 == expected_crc32
        if is_intact:
            self.tables.discard(shard.url)
            data.replace(self._shard(shard.url))
        self.abandon(shard)
        return is_intact

    def abandon(self, shard: PartialShard) -> None:
        """Remove the files of a shard that was fetched in pieces, and release its lock."""
        shutil.rmtree(shard.folder, ignore_errors=True)
        self._begun.discard(name_of(shard.url))
        shard.lock.release()

    def touch(self, url: str, expected_bytes: int) -> bool:
        """Mark the shard as used and return True, or return False if no copy of the expected size is cached."""
        shard = self._shard(url)
        with suppress(FileNotFoundError):
            if shard.stat().st_size == expected_bytes:
                os.utime(shard)
                return True
        return False

    def remove(self, url: str) -> None:
        """Remove the copy of a shard or file, so that the next reader fetches it again; open copies stay readable."""
        self._shard(url).unlink(missing_ok=True)

    def arrived(self) -> int:
        """Return how many bytes complete and partial shards take on disk; this number changes during a fetch."""
        folders = [self._folder / "shards", *(self._folder / "fetching").iterdir()]
        total = 0
        for folder in folders:
            total += sum(status.st_blocks * _BLOCK_OF_STAT for _, status in files_in(folder))  # excludes holes in files
        return total

    def waits_for_storage(self) -> bool:
        """Return whether this node is waiting for its storage; while it waits, no shards can arrive."""
        return _modified(self._folder / "outage") > time.time()

    def _shard(self, url: str) -> Path:
        """Return the path of a shard's copy, whose name ends with up to 60 characters of the shard's name."""
        _, _, base_name = url.split("?")[0].rstrip("/").rpartition("/")
        safe_name = re.sub(r"[^A-Za-z0-9._-]+", "_", base_name)
        return self._folder / "shards" / f"{name_of(url)}-{safe_name[-60:]}"

    def _try_to_fetch(self, url: str, size: int, crc32: int | None, retries: Retries) -> float:
        """Fetch a shard unless another process is doing so or space is short.

        Returns how many seconds to wait before checking again whether the shard is cached. Raises the same errors as
        `Retries.pause_after`, and FetchError if the shard could not be fetched in the last minute.
        """
        name = name_of(url)
        failed = self._folder / "failed" / name
        with suppress(Timeout), FileLock(self._folder / "locks" / name, blocking=False):
            if self.touch(url, size):  # another process has fetched it in the meantime
                return 0
            if time.time() - _modified(failed) < _RETRY_AFTER:
                raise FetchError(*json.loads(failed.read_text(encoding="utf-8")))
            partial = self._reserve(name, size)
            if partial is None:
                return _POLL
            self.tables.discard(url)
            try:
                attempt(url, partial, self.timeout, size, crc32).replace(self._shard(url))
                return 0
            except AttemptFailed as failure:
                return self._pause_after(failure, retries)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return _POLL

    def _pause_after(self, failure: AttemptFailed, retries: Retries) -> float:
        """Return the seconds to wait after a failed attempt; record FetchErrors and repeated failures for the node.

        Raises the same errors as `Retries.pause_after`.
        """
        try:
            pause = retries.pause_after(failure)
        except FetchError as error:
            failed = self._folder / "failed" / name_of(retries.url)
            failed.write_text(json.dumps([str(error), error.damaged]), encoding="utf-8")
            raise
        if retries.failures > 1:
            outage = self._folder / "outage"
            now = time.time()
            if _modified(outage) < now - _RETRY_AFTER:
                log.warning(
                    "waiting for shards: %s cannot be fetched (%s); if this continues, check the storage",
                    retries.url,
                    failure,
                )
            outage.touch()
            os.utime(outage, (now, now + pause + 2 * self.timeout))  # until the next attempt has ended
        return pause

    def _reserve(self, name: str, size: int) -> Path | None:
        """Make space for a shard whose lock the caller holds, by evicting the least recently used shards.

        Returns a folder for the partial file, or None if other shards that are being fetched have reserved the space.
        """
        fetching = self._folder / "fetching"
        reserved: set[tuple[str, int]] = set()  # names and sizes of shards that are being fetched
        with FileLock(self._folder / "lock"):
            # partial shards first, so that one that is completed in the meantime is not missed
            for other in list(fetching.iterdir()):
                if not _RESERVED.fullmatch(other.name):
                    continue  # not written by a cache
                owner, _, reserved_bytes = other.name.partition("-")
                if owner in self._begun:
                    reserved.add((owner, int(reserved_bytes)))
                    continue
                lock = FileLock(self._folder / "locks" / owner, blocking=False)
                try:
                    with nullcontext() if owner == name else lock:
                        shutil.rmtree(other, ignore_errors=True)  # the process that fetched this shard has ended
                except Timeout:
                    reserved.add((owner, int(reserved_bytes)))
            free = self.capacity_bytes - sum(taken for _, taken in reserved)
            if size > free:
                return None
            remove_oldest(self._folder / "shards", free - size, counted=reserved)
            partial = fetching / f"{name}-{size}"
            partial.mkdir(exist_ok=True)
            return partial


def _wait(seconds: float) -> None:
    """Wait for a number of seconds; raise `Interrupted` at once if a stop signal arrives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with raising_at_once():  # the end of the step, when signals are otherwise handled, may be an hour away
            time.sleep(_POLL)


def _modified(path: Path) -> float:
    """Return a file's modification time, or 0 if the file is absent."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0
