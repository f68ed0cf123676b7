"""The copy of a run in a remote store that fsspec reaches (S3, GCS, Azure, SFTP, a mounted folder).

    URL/checkpoints/step_000000100/    the files of the checkpoint of that name; meta.json is written last
    URL/checkpoints/best.json          as in the run's folder
    URL/metrics.jsonl, log.txt ...     the other files of the run's folder, without its subfolders

A folder without meta.json is no checkpoint: it is being written, or a write was interrupted. meta.json is also the
first file that is deleted, so that no part of a checkpoint is ever taken for one.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import fsspec

from neuclip_ds.checkpoint.integrity import META, DamagedCheckpoint, verify_file
from neuclip_ds.checksum import Checksum
from neuclip_ds.data.failures import FailureKind, TransferFailure, describe_error
from neuclip_ds.data.fetch import backoff_of

T = TypeVar("T")

_BEST = "best.json"
_ATTEMPTS = 5  # per file
_BACKOFF = 1.0  # seconds before the second attempt, doubled for each further one
_FINAL = (FailureKind.MISSING, FailureKind.SETUP, FailureKind.DAMAGED)  # a retry would fail too
_FILES_AT_ONCE = 8
# their objects appear complete and need no folder; creating one might create a bucket whose name is misspelt
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"}


class RemoteRun:
    """The copy of one run.

    Each file is tried several times. All methods raise `TransferFailure` where that does not help.

    Args:
        url: folder of the copy, with credentials as fsspec finds them.
    """

    def __init__(self, url: str) -> None:
        try:
            # nothing is cached, as another machine may have written there meanwhile
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except Exception as error:
            raise describe_error(error) from error
        protocols = self._fs.protocol
        self._is_object_store = bool(_OBJECT_STORES & ({protocols} if isinstance(protocols, str) else set(protocols)))
        self._root = root.rstrip("/")
        self._checkpoints = f"{self._root}/checkpoints"

    def open(self) -> tuple[list[str], str | None]:
        """Return the names of its checkpoints, the oldest first, and of the best, after a trial to write there."""
        probe = f"{self._root}/.writable"
        self._write(probe, b"")
        _persist(lambda: self._fs.rm_file(probe), probe)
        complete, best = self.complete(), self._best()
        return complete, best if best in complete else None

    def complete(self) -> list[str]:
        """Return the names of its checkpoints, the oldest first."""
        found = _persist(lambda: self._fs.glob(f"{self._checkpoints}/step_*/{META}"), self._checkpoints)
        return sorted(str(path).split("/")[-2] for path in found)

    def copy(self, folder: str, names: Sequence[str], keep: int | None) -> None:
        """Copy checkpoints of a run, the files next to them, and delete the copies of older checkpoints.

        Args:
            folder: the run's folder.
            names: of the checkpoints, the most important first; those that are there already are not copied again.
            keep: number of newest checkpoints that stay, besides the best one; None keeps all.
        """
        run = Path(folder)
        for name in names:
            self._copy_checkpoint(run / "checkpoints" / name)
        records = [path for path in run.iterdir() if path.is_file() and not path.name.startswith(".")]
        self._put_all((path, f"{self._root}/{path.name}") for path in records)
        best = run / "checkpoints" / _BEST
        if best.is_file():
            self._put(best, f"{self._checkpoints}/{_BEST}")
        self._prune(keep)

    def fetch_checkpoint(self, name: str, target: str, rank: int, world_size: int) -> None:
        """Fetch a rank's share of a checkpoint's files into an existing folder; raise where one is damaged."""
        source = f"{self._checkpoints}/{name}"
        sizes = {path.removeprefix(f"{source}/"): size for path, size in self._sizes(source).items()}
        written = json.loads(_persist(lambda: self._fs.cat_file(f"{source}/{META}"), source)).get("files", {})
        share = sorted(sizes, key=lambda file: (sizes[file], file))[rank::world_size]

        def fetch(file: str) -> None:
            path = Path(target) / file
            if ".." in path.parts:
                raise TransferFailure(f"{file} would lie outside the checkpoint", FailureKind.DAMAGED)
            path.parent.mkdir(parents=True, exist_ok=True)
            _persist(lambda: self._fs.get_file(f"{source}/{file}", str(path)), file)
            if file in written:
                try:
                    verify_file(path, Checksum(*written[file]))
                except DamagedCheckpoint as error:
                    raise TransferFailure(str(error), FailureKind.DAMAGED) from error

        _all(fetch, share)

    def fetch_records(self, folder: str) -> None:
        """Fetch the run's other files into its folder."""
        listed = _persist(lambda: self._fs.ls(self._root, detail=True), self._root)
        names = [info["name"].rpartition("/")[2] for info in listed if info["type"] == "file"]
        for name in (*names, f"checkpoints/{_BEST}"):
            if (content := self._read(f"{self._root}/{name}")) is not None:
                (Path(folder) / name).write_bytes(content)

    def _copy_checkpoint(self, checkpoint: Path) -> None:
        target, meta = f"{self._checkpoints}/{checkpoint.name}", (checkpoint / META).read_bytes()
        if self._read(f"{target}/{META}") == meta:
            return
        self._delete(target)  # half of one, or that of an earlier start
        files = [path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / META]
        places = {path: f"{target}/{path.relative_to(checkpoint).as_posix()}" for path in files}
        self._put_all(places.items())
        arrived = self._sizes(target)
        for path, place in places.items():
            if arrived.get(place) != path.stat().st_size:
                reason = f"{place} has {arrived.get(place)} bytes after the copy, not {path.stat().st_size}"
                raise TransferFailure(reason, FailureKind.DAMAGED)
        self._write(f"{target}/{META}", meta)

    def _prune(self, keep: int | None) -> None:
        """Delete all but the newest checkpoints and the best, and what interrupted copies have left."""
        complete = self.complete()
        kept = set(complete if keep is None else complete[-keep:])
        kept.add(self._best() or "")
        found = {path.removeprefix(f"{self._checkpoints}/").split("/")[0] for path in self._sizes(self._checkpoints)}
        for name in sorted(found):
            if name.startswith("step_") and name not in kept:
                self._delete(f"{self._checkpoints}/{name}")

    def _best(self) -> str | None:
        """Return the name of the checkpoint that best.json names."""
        content = self._read(f"{self._checkpoints}/{_BEST}")
        return None if content is None else f"step_{json.loads(content)['step']:09d}"

    def _put_all(self, files: Iterable[tuple[Path, str]]) -> None:
        _all(lambda file: self._put(*file), files)

    def _put(self, path: Path, place: str) -> None:
        self._make_parent(place)
        _persist(lambda: self._fs.put_file(str(path), place), place)

    def _write(self, place: str, data: bytes) -> None:
        """Write a small file, which appears complete."""
        self._make_parent(place)
        if self._is_object_store:
            _persist(lambda: self._fs.pipe_file(place, data), place)
            return
        temporary = f"{place}.partial"
        _persist(lambda: self._fs.pipe_file(temporary, data), place)
        _persist(lambda: self._fs.mv(temporary, place), place)

    def _make_parent(self, place: str) -> None:
        if not self._is_object_store:
            _persist(lambda: self._fs.makedirs(place.rpartition("/")[0], exist_ok=True), place)

    def _read(self, place: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        try:
            return _persist(lambda: self._fs.cat_file(place), place)
        except TransferFailure as failure:
            if failure.kind is FailureKind.MISSING:
                return None
            raise

    def _sizes(self, place: str) -> dict[str, int]:
        """Return the files in a folder and those below it, with their sizes."""
        found = _persist(lambda: self._fs.find(place, detail=True), place)
        return {str(path): int(info["size"]) for path, info in found.items()}

    def _delete(self, target: str) -> None:
        """Delete a checkpoint, first what makes it one."""
        if self._read(f"{target}/{META}") is not None:
            _persist(lambda: self._fs.rm_file(f"{target}/{META}"), target)
        if _persist(lambda: self._fs.exists(target), target):
            _persist(lambda: self._fs.rm(target, recursive=True), target)


def _persist(work: Callable[[], T], name: str) -> T:
    """Return what `work` gives, tried again with exponential backoff where it fails."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return work()
        except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
            if describe_error(error).kind in _FINAL:
                raise describe_error(error) from error
            time.sleep(backoff_of(name, attempt, _BACKOFF))
    try:
        return work()
    except Exception as error:
        failure = describe_error(error)
        raise TransferFailure(f"{failure} ({_ATTEMPTS} attempts)", failure.kind) from error


def _all(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Call `work` with all items, several at a time."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        for _ in pool.map(work, items):
            pass
