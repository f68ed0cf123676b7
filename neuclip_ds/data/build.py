"""Build manifests: in memory when a run starts, or on disk with many processes for large datasets.

Indices are assigned in the order of the paths, regardless of the order in which the shards were scanned. After an
interrupted build on disk, the next build in the same folder with the same options scans only the shards that have no
results yet or whose size has changed, even if its list of shards differs; remote shards with results are assumed to be
unchanged. Each group of shards has a JSON file of results, whose name begins with a hash of the options, and may have a
file of sample tables. Files that were truncated by an interrupted write are ignored.
"""

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.data.children import map_in_processes
from neuclip_ds.data.decoders import Captions
from neuclip_ds.data.manifest import SHARD_FIELDS, Manifest, Shard, from_shards
from neuclip_ds.data.manifest_file import SAMPLES, check_distinct, is_manifest, load_manifest, write_shards
from neuclip_ds.data.sample_table import SampleTable, SampleTables, TableLocation, write_part
from neuclip_ds.data.scan import Scan, ScanOptions, Scans, check_usable, log_loss, scan_shard
from neuclip_ds.data.shards import is_local, resolve_shards
from neuclip_ds.data.side_files import check_names, count_shards
from neuclip_ds.data.uids import UidFiles
from neuclip_ds.errors import UserError, redact
from neuclip_ds.files import atomic_write, explain_disk

log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # (shards done, total shards)
RESUME = "choose another folder; with the same folder, the build resumes"

_BUILDING = ".building"  # folder of an unfinished build's results
_RESULT = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.json")  # name of a file of results: the hash of the options, a UUID
# name of a file of sample tables, or of its temporary file; other files in the folder belong to the user
_TABLES = re.compile(r"part-\d{8}-[0-9a-f]{8}\.parquet|\.part-\d{8}-[0-9a-f]{8}\.parquet\.\d+")
_RESULTS_VERSION = 2  # format version of the results
_UNREADABLE = "unreadable_shards.jsonl"
_MOST_COMPARED = 500_000_000  # maximum number of samples for which uids and images are compared
_SHARDS_PER_PROCESS = 16  # scanning this many shards takes longer than starting a process
_MAX_GROUP = 64  # maximum shards per group; one worker scans a group and writes its tables to one file
GROUPS = 1024  # target number of groups
_SIDE_FILE_GROUP = 512  # shards per group if samples are counted from side files


def build_manifest(
    paths: Sequence[str], processes: int | None = None, options: ScanOptions = ScanOptions()
) -> Manifest:
    """Build an in-memory manifest of the tar files at `paths`, in the given order.

    By default, there is about one worker process per 16 shards, up to one per CPU. With `processes=1`, the default for
    fewer than 16 shards, this process scans the shards. Raises UserError if `scan_shard` raises it, if no sample has
    both an image and a caption, or if a worker process ends early.
    """
    processes = processes or min(os.cpu_count() or 1, 1 + len(paths) // _SHARDS_PER_PROCESS)
    scans = list(map_in_processes(partial(_scan_without_table, options=options), paths, processes))
    for scan in scans:
        log_loss(scan)
    check_usable(scans, paths)
    return from_shards([scan.shard for scan in scans])


def _scan_without_table(path: str, options: ScanOptions) -> Scan:
    scan, _ = scan_shard(path, options)
    return scan


def open_manifest(
    source: str,
    cache: Path,
    processes: int | None = None,
    options: ScanOptions = ScanOptions(),
) -> Manifest:
    """Open the manifest folder `source`, or build the manifest of the local shards that `resolve_shards` finds for it.

    A manifest of local shards is stored in `cache` under a hash of the options and of the shards' paths, sizes and
    modification times. It is reused until one of them changes or the stored manifest is damaged. Several processes may
    call this function at the same time. `processes` is as in `build_manifest`.

    Raises UserError if no shard is found; if a shard is remote and `source` is not a manifest folder; if two shards
    contain the same samples; if the sample tables of a manifest folder lack members that contain captions; if `source`
    cannot be read or `cache` cannot be written; or if `build_manifest` raises it.
    """
    if source and is_manifest(source):
        manifest = load_manifest(source)
        if manifest.samples is not None:
            members = Captions(options.captions).extensions
            missing = [name for name in members if name not in manifest.samples.members]
            if missing:
                raise UserError(
                    f"The manifest {source} does not list the members {', '.join(missing)} of its samples; build it "
                    f"again with neuclip-ds build-manifest --captions {' '.join(options.captions)}."
                )
    else:
        paths = resolve_shards(source)
        remote = next((path for path in paths if not is_local(path)), None)
        if remote is not None:
            raise UserError(f"{remote} is remote: run neuclip-ds build-manifest once, and pass the manifest's folder.")
        folder = cache / _fingerprint(paths, options)
        stored = _load_stored(folder)
        manifest = stored or build_manifest(paths, processes, options)
        if stored is None:
            remedy = "build the manifest in another folder with neuclip-ds build-manifest, and pass that folder"
            with explain_disk(folder, remedy):
                folder.mkdir(parents=True, exist_ok=True)
                write_shards(manifest, folder)
    check_distinct(manifest)
    return manifest


def _load_stored(folder: Path) -> Manifest | None:
    """Return the manifest that an earlier launch stored, or None if it does not exist or cannot be used."""
    if not is_manifest(folder):
        return None
    try:
        return load_manifest(folder)
    except UserError as error:
        problem = str(error).rsplit(";", 1)[0]  # the rest is advice about the user's own manifests
        log.warning("rebuilding the stored manifest, because it cannot be used; no action is needed. %s", problem)
        return None


def _fingerprint(paths: Sequence[str], options: ScanOptions) -> str:
    digest = hashlib.sha256(f"{options}\n".encode())
    for path in paths:
        status = Path(path).stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _size_of(path: str) -> int | None:
    """Return a shard's size in bytes, or None if the shard is remote or missing; the scan reports a missing shard."""
    if not is_local(path):
        return None
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def write_manifest(
    folder: Path,
    paths: Sequence[str],
    executor: Executor,
    options: ScanOptions = ScanOptions(),
    *,
    skip_unreadable: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Manifest:
    """Build a manifest in `folder`, or resume an interrupted build, and return the manifest.

    Args:
        folder: the folder for the manifest; it must not contain a manifest yet.
        paths: the shards, in the order in which indices are assigned.
        executor: the executor whose workers (processes on this machine, or MPI ranks) scan the shards.
        options: the options of the scan; if they include uids or checksums, the manifest has sample tables.
        skip_unreadable: whether to omit unusable shards, and list them in FOLDER/unreadable_shards.jsonl.
        on_progress: called with (shards done, total shards); shards scanned by an interrupted build count as done.

    Raises:
        UserError: `folder` contains a manifest or cannot be written, the options conflict, two shards contain the same
            samples, a shard changes during the scan, a uid file or a shard cannot be used (with `skip_unreadable`: all
            shards), or no sample has both an image and a caption.
    """
    if is_manifest(folder):
        raise UserError(f"{folder} already contains a manifest; delete the folder, or choose a different one.")
    if options.side_files:
        if options.has_tables:
            raise UserError(
                "Uids and checksums cannot be read from side files; omit --from-side-files, or omit --uids."
            )
        check_names(paths)
    UidFiles(options.uids).check_order()
    sizes = {path: _size_of(path) for path in paths}
    if len(sizes) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"{twice} is listed more than once; list every shard once.")

    # scan the shards that an interrupted build has not scanned
    results = folder / _BUILDING
    tables = folder / SAMPLES
    scans, failures = scan_shards(
        results, tables if options.has_tables else None, sizes, options, executor, on_progress
    )
    if failures and not (skip_unreadable and scans):
        advice = "Fix the shards, or pass other sources."
        if scans:
            advice = (
                "Fix these shards, omit them from the sources, or pass --skip-unreadable to build the manifest without "
                "them; then run the command again, which does not repeat the scans of the other shards."
            )
        first = next(iter(failures.values()))
        raise UserError(f"{len(failures)} of {len(paths)} shards cannot be used. The first: {first} {advice}")
    for scan in scans:
        log_loss(scan)
    check_usable(scans, paths)
    manifest = from_shards([scan.shard for scan in scans])
    check_distinct(manifest)
    locations = []
    for scan in scans:
        if scan.table is not None:
            name, row_group = scan.table
            locations.append(TableLocation(tables / name, row_group))
    if locations:
        SampleTables.open(locations, [shard.n for shard in manifest.shards])

    unreadable = folder / _UNREADABLE
    unreadable.unlink(missing_ok=True)
    if failures:
        lines = (json.dumps({"shard": path, "reason": reason}) for path, reason in failures.items())
        with explain_disk(unreadable, RESUME), atomic_write(unreadable) as temporary:
            temporary.write_text("".join(f"{redact(line)}\n" for line in lines), encoding="utf-8")
        log.warning(
            "%d of %d shards cannot be used and are omitted; %s lists them", len(failures), len(paths), unreadable
        )

    with explain_disk(folder, RESUME):
        write_shards(manifest, folder, locations)  # last, because this makes the folder a manifest
    used = {location.file for location in locations}
    for path in tables.glob("*"):
        if _TABLES.fullmatch(path.name) and path not in used:
            path.unlink()
    for path in results.glob("*"):
        if _RESULT.fullmatch(path.name):
            path.unlink()
    with suppress(OSError):  # the folder contains other files
        results.rmdir()
    written = load_manifest(folder)
    _warn_of_repeats(written)
    return written


def scan_shards(
    results: Path,
    tables: Path | None,
    sizes: Mapping[str, int | None],
    options: ScanOptions,
    executor: Executor,
    on_progress: OnProgress,
) -> Scans:
    """Scan the shards that an interrupted scan has not finished, and return all results in the order of `sizes`.

    The results are the scans, and the reason for each shard that cannot be used.

    Args:
        results: the folder for the results of finished groups.
        tables: the folder for the sample tables, or None to omit the tables.
        sizes: maps the path of each shard to its size in bytes, or to None if the size is unknown.
        options: the options of the scan.
        executor: as in `write_manifest`.
        on_progress: called with (shards done, total shards); shards finished by an interrupted scan count as done.

    Raises:
        UserError: the results or the tables cannot be written, a shard changed during the scan, or `count_shards`
            raises it.
    """
    uid_files = [Path(path).stat() for path in options.uids]
    versions = [(status.st_size, status.st_mtime_ns) for status in uid_files]
    settings = f"{_RESULTS_VERSION} {options} {versions} {tables is not None}"
    key = hashlib.sha256(settings.encode()).hexdigest()[:16]
    with explain_disk(results, "choose another folder"):
        (tables or results.parent).mkdir(parents=True, exist_ok=True)
        results.mkdir(mode=0o700, exist_ok=True)  # URLs may contain secrets

    # reuse the results of an interrupted scan
    by_path: dict[str, Scan] = {}
    for file in results.glob(f"{key}-*.json"):
        for scan in _read_scans(file, tables):
            path = scan.shard.path
            if path in sizes and sizes[path] in (None, scan.shard.bytes):
                by_path[path] = scan

    # scan the other shards in groups
    failures: dict[str, str] = {}
    missing = [path for path in sizes if path not in by_path]
    group_size = _SIDE_FILE_GROUP if options.side_files else min(_MAX_GROUP, 1 + len(missing) // GROUPS)
    pending: list[Future[Scans]] = []
    on_progress(len(by_path), len(sizes))
    try:
        for start in range(0, len(missing), group_size):
            group = missing[start : start + group_size]
            if options.side_files:
                pending.append(executor.submit(count_shards, {path: sizes[path] for path in group}))
            else:
                part = None if tables is None else tables / f"part-{start:08d}-{uuid.uuid4().hex[:8]}.parquet"
                pending.append(executor.submit(_scan_group, group, options, part))
        for future in as_completed(pending):
            scans, failed = future.result()
            by_path |= {scan.shard.path: scan for scan in scans}
            failures |= failed
            _write_scans(results / f"{key}-{uuid.uuid4().hex}.json", scans)
            on_progress(len(by_path) + len(failures), len(sizes))
    finally:  # after Ctrl-C or a worker's error, do not wait for groups that have not started
        for future in pending:
            future.cancel()
    for path, scan in by_path.items():
        if sizes[path] not in (None, scan.shard.bytes):
            raise UserError(f"Shard {path} changed while it was being scanned; run the same command again.")
    scans_in_order = [by_path[path] for path in sizes if path in by_path]
    failures_in_order = {path: failures[path] for path in sizes if path in failures}
    return scans_in_order, failures_in_order


def _scan_group(paths: Sequence[str], options: ScanOptions, part: Path | None) -> Scans:
    """Scan shards in a worker, and write their sample tables to the file `part`, if given."""
    scans: list[Scan] = []
    tables: list[SampleTable] = []
    failures: dict[str, str] = {}
    for path in paths:
        try:
            scan, table = scan_shard(path, options)
        except UserError as error:
            failures[path] = str(error)
        else:
            if part is not None:
                scan = replace(scan, table=(part.name, len(tables)))
            scans.append(scan)
            tables.append(table)
    if part is not None and tables:
        with explain_disk(part, RESUME), atomic_write(part) as temporary:
            write_part(temporary, tables)
    return scans, failures


def _write_scans(path: Path, scans: Sequence[Scan]) -> None:
    """Write the scans of a group as a JSON list with a list for each scan."""
    rows: list[list[Any]] = []
    for scan in scans:
        shard = [getattr(scan.shard, name) for name in SHARD_FIELDS]
        rows.append([shard, scan.n_images, scan.n_captions, scan.extensions, scan.lost_bytes, scan.causes, scan.table])
    with explain_disk(path, RESUME):
        path.write_text(json.dumps(rows), encoding="utf-8")


def _read_scans(path: Path, tables: Path | None) -> list[Scan]:
    """Read the scans of a group, omitting scans whose sample tables no longer exist; return [] for a truncated file."""
    scans = []
    try:
        rows = json.loads(path.read_bytes())
    except ValueError:
        return []
    for shard, n_images, n_captions, extensions, lost_bytes, causes, table in rows:
        if tables is not None and (table is None or not (tables / table[0]).is_file()):
            continue
        scans.append(
            Scan(
                shard=Shard(**dict(zip(SHARD_FIELDS, shard, strict=True))),
                n_images=n_images,
                n_captions=n_captions,
                extensions=extensions,
                lost_bytes=lost_bytes,
                causes=causes,
                table=None if table is None else tuple(table),
            )
        )
    return scans


def _warn_of_repeats(manifest: Manifest) -> None:
    """Log a warning if samples have the same uid, and another one if they have the same image checksum.

    The check takes 16 bytes of RAM per sample. It is skipped if there are no sample tables or over 500 million samples.
    """
    if manifest.samples is None or manifest.n > _MOST_COMPARED:
        return
    tables = manifest.samples
    repeated_hashes, count = _repeats(map(_hash_uids, tables.uids()))
    if len(repeated_hashes):
        high, low = _find_uid(tables, repeated_hashes[0])
        log.warning(
            "%d of %d samples have the uid of an earlier sample, such as %016x%016x: --uids keeps all samples with the "
            "same uid, or none of them. Give each sample a different uid, or omit the copies.",
            len(repeated_hashes),
            count,
            high,
            low,
        )
    repeated_checksums, count = _repeats(tables.image_checksums())
    if len(repeated_checksums):
        log.warning(
            "%d of %d samples have the image of an earlier sample: within a batch, equal images are negatives of each "
            "other. Put all captions of an image into one sample, as neuclip-ds pack does, or omit copies (--uids).",
            len(repeated_checksums),
            count,
        )


def _repeats(arrays: Iterable[NDArray[np.uint64]]) -> tuple[NDArray[np.uint64], int]:
    """Return the numbers that repeat an earlier number, and how many numbers there are in total."""
    numbers = np.concatenate([*arrays, np.empty(0, np.uint64)])
    numbers.sort()
    is_repeat = numbers[1:] == numbers[:-1]
    return numbers[1:][is_repeat], len(numbers)


def _find_uid(tables: SampleTables, uid_hash: np.uint64) -> tuple[int, int]:
    """Return the first uid for which `_hash_uids` returns `uid_hash`."""
    for uids in tables.uids():
        matches = uids[_hash_uids(uids) == uid_hash]
        if len(matches):
            return int(matches[0, 0]), int(matches[0, 1])
    raise AssertionError("no uid has this hash")


def _hash_uids(uids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64-bit hashes of the (q, 2) uids, with few collisions even if some bits are constant, as in UUIDs."""
    return uids[:, 0] * np.uint64(0x9E3779B97F4A7C15) + uids[:, 1]
