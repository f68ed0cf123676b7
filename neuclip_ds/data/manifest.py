"""The manifest: which shards a data set has, and the global index at which each one starts.

A sample's index is its shard's start + its ordinal among all samples of the tar, incomplete ones included, so that
it never moves. On disk a manifest is a folder with `meta.json` (version, totals, content hash) and `shards.parquet`
(one row a shard). Building it walks the headers of every shard once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from neuclip_ds.data.shards import resolve_shards
from neuclip_ds.data.tar import read_index
from neuclip_ds.errors import UserError

logger = logging.getLogger(__name__)

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")  # the first one that a sample has is its image
CAPTION_EXTENSION = "txt"
_VERSION = 1
_SCHEMA = pa.schema(
    [("path", pa.string()), ("start", pa.int64()), ("n", pa.int64()), ("bytes", pa.int64()), ("n_bad", pa.int64())]
)


class Shard(NamedTuple):
    """One tar: `n` samples, indices start ... start + n - 1, `n_bad` of them without image or caption."""

    path: str
    start: int
    n: int
    bytes: int
    n_bad: int


class Manifest:
    """Shards in their order; `start` of each is the number of samples before it."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self.n_shards = len(self.shards)
        self.n = sum(shard.n for shard in self.shards)
        self.n_bad = sum(shard.n_bad for shard in self.shards)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """(n_shards,) index of each shard's first sample."""
        return np.array([shard.start for shard in self.shards], dtype=np.int64)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """(n_shards,) samples in each shard."""
        return np.array([shard.n for shard in self.shards], dtype=np.int64)

    @cached_property
    def content_hash(self) -> str:
        """32 hex digits over file names, counts and sizes in order; folders do not count, so data may be moved."""
        lines = (f"{Path(shard.path).name}\0{shard.n}\0{shard.bytes}\n" for shard in self.shards)
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def locate(self, index: int) -> tuple[int, int]:
        """(shard number, ordinal within it) of a global index; IndexError beyond 0 ... n - 1."""
        if not 0 <= index < self.n:
            raise IndexError(f"sample {index} of a data set of {self.n}")
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return shard, index - self.shards[shard].start

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the manifest as a folder, complete or not at all. UserError where the folder holds something else."""
        folder = Path(folder)
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} exists already; remove it or name another folder for the manifest.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        aside.mkdir(exist_ok=True)
        try:
            self._write(aside)
            aside.replace(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _write(self, folder: Path) -> None:
        columns = zip(*self.shards, strict=True) if self.shards else [[]] * len(_SCHEMA)
        table = pa.table([list(column) for column in columns], schema=_SCHEMA)
        pq.write_table(table, folder / "shards.parquet")
        meta = {"version": _VERSION, "n": self.n, "n_shards": self.n_shards, "content_hash": self.content_hash}
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a manifest folder."""
    return (Path(path) / "meta.json").is_file() and (Path(path) / "shards.parquet").is_file()


def load_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read a manifest folder. UserError if it is none, is damaged, or its shards are not where it says."""
    folder = Path(folder)
    if not is_manifest(folder):
        raise UserError(f"{folder} is not a manifest folder (meta.json and shards.parquet); build the manifest first.")
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        rows = pq.read_table(folder / "shards.parquet", schema=_SCHEMA).to_pydict()
        manifest = Manifest([Shard(*row) for row in zip(*(rows[name] for name in _SCHEMA.names), strict=True)])
    except (ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"The manifest in {folder} cannot be read ({error}); remove it and build it again.") from error
    if meta.get("version") != _VERSION:
        raise UserError(f"The manifest in {folder} has version {meta.get('version')}, not {_VERSION}; build it again.")
    if meta.get("content_hash") != manifest.content_hash:
        raise UserError(f"The manifest in {folder} does not match its own hash; remove it and build it again.")
    if manifest.shards and not Path(manifest.shards[0].path).exists():
        raise UserError(
            f"Shard {manifest.shards[0].path} of the manifest in {folder} does not exist; "
            "restore the shards or build the manifest where they are now."
        )
    return manifest


class _Scan(NamedTuple):
    """What a header walk finds in one shard."""

    n: int
    bytes: int
    n_images: int
    n_captions: int
    n_pairs: int
    extensions: frozenset[str]
    lost_bytes: int


def _scan(path: str) -> _Scan:
    try:
        samples, gaps = read_index(path)
        size = Path(path).stat().st_size
    except OSError as error:
        raise UserError(
            f"Shard {path} cannot be read: {error.strerror}; check the file and its permissions."
        ) from error
    images = [any(extension in entry.members for extension in IMAGE_EXTENSIONS) for entry in samples]
    captions = [CAPTION_EXTENSION in entry.members for entry in samples]
    pairs = sum(image and caption for image, caption in zip(images, captions, strict=True))
    extensions = frozenset().union(*(entry.members for entry in samples[:100]))
    lost = sum(gap.size for gap in gaps)
    return _Scan(len(samples), size, sum(images), sum(captions), pairs, extensions, lost)


def build_manifest(
    paths: Sequence[str], processes: int | None = None, on_progress: Callable[[int, int], None] | None = None
) -> Manifest:
    """Walk the headers of the tars `paths`, in their order.

    Args:
        processes: workers to walk with, as many as CPUs by default; 1 walks in this process.
        on_progress: called with (shards done, shards in all) after each shard.

    Raises:
        UserError: a shard cannot be read, or there are no samples, no images or no captions in all of them.
    """
    processes = min(processes or os.cpu_count() or 1, len(paths))
    scans: list[_Scan] = []
    with ExitStack() as stack:
        results: Iterable[_Scan] = map(_scan, paths)
        if processes > 1:
            results = stack.enter_context(ProcessPoolExecutor(processes)).map(_scan, paths, chunksize=1)
        for path, scan in zip(paths, results, strict=True):
            _warn(path, scan)
            scans.append(scan)
            if on_progress is not None:
                on_progress(len(scans), len(paths))
    _check_pairs(paths, scans)
    starts = np.cumsum([0] + [scan.n for scan in scans])[:-1]
    return Manifest(
        [
            Shard(os.fspath(path), int(start), scan.n, scan.bytes, scan.n - scan.n_pairs)
            for path, start, scan in zip(paths, starts, scans, strict=True)
        ]
    )


def _warn(path: str, scan: _Scan) -> None:
    if scan.lost_bytes:
        logger.warning("%s is damaged: %d of %d bytes cannot be read", path, scan.lost_bytes, scan.bytes)
    if scan.n == 0 or scan.n_pairs < scan.n:
        logger.warning("%s: %d of %d samples have an image and a caption", path, scan.n_pairs, scan.n)


def _check_pairs(paths: Sequence[str], scans: Sequence[_Scan]) -> None:
    """UserError where the shards, taken together, cannot be trained on."""
    where = f"{len(paths)} tars in {Path(paths[0]).parent}" if len(paths) > 1 else "".join(paths)
    found = ", ".join(sorted(frozenset().union(*(scan.extensions for scan in scans)))[:10])
    if not any(scan.n for scan in scans):
        raise UserError(f"No samples in {where}; samples are members such as 000000001.jpg and 000000001.txt.")
    if not any(scan.n_images for scan in scans):
        raise UserError(
            f"No sample has an image in {where} (extensions found: {found}); "
            f"images are members that end in {', '.join(IMAGE_EXTENSIONS)}."
        )
    if not any(scan.n_captions for scan in scans):
        raise UserError(
            f"No captions in {where} (extensions found: {found}); add a .txt member with the caption beside each image."
        )


def open_manifest(
    source: str,
    cache: Path,
    processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """The manifest that `source` names: a manifest folder, or any form that `resolve_shards` takes.

    In the second case it is built and kept in `cache`, under a name that holds the shards' paths, sizes and times,
    so that it is used again until one of them changes. Several processes may do this at once.
    """
    if source and is_manifest(source):
        return load_manifest(source)
    paths = resolve_shards(source)
    folder = cache / _fingerprint(paths)
    if is_manifest(folder):
        return load_manifest(folder)
    manifest = build_manifest(paths, processes, on_progress)
    try:
        manifest.save(folder)
    except (OSError, UserError):
        if not is_manifest(folder):  # otherwise another process was faster, with the same content
            raise
    return manifest


def _fingerprint(paths: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{_VERSION}\n".encode())
    for path in paths:
        status = Path(path).stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]
