"""Build manifests: in memory when a run starts, or on disk with many processes for large data sets.

On disk the workers keep what they find of each shard in a journal, `FOLDER/.building/`, so that a build that is
interrupted, or named other shards, scans only the missing ones. Indices are assigned at the end in the order of the
paths, whatever the order in which shards were scanned; then the sample tables are written in that order.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.captions import Captions
from neuclip_ds.data.children import process_pool
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.journal import RESUME, TablePlace
from neuclip_ds.data.manifest import SAMPLES, Manifest, Shard, extend, is_manifest, load_manifest, write_shards
from neuclip_ds.data.repeats import check_distinct
from neuclip_ds.data.resumable_scan import Failure, OnProgress, ResumableScan
from neuclip_ds.data.sample_table import list_parts, part_name, write_part
from neuclip_ds.data.scan import Scan, ScanOptions, check_usable, describe_paths, log_loss, scan_shard
from neuclip_ds.data.shards import is_local, resolve_shards
from neuclip_ds.data.side_files import list_shards
from neuclip_ds.data.uids import UidFiles
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

log = logging.getLogger(__name__)

_MAX_PART = 64  # shards in a part of the sample tables
_MIN_PARTS = 64  # so that many workers can write them
_WORK = ".building"
_BAD = "bad_samples.jsonl"
_UNREADABLE = "unreadable_shards.jsonl"


def build_manifest(
    paths: Sequence[str],
    processes: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
    options: ScanOptions = ScanOptions(),
) -> Manifest:
    """Return a manifest, held in memory, of the tars `paths` in this order.

    Args:
        processes: worker processes that scan the shards, by default the number of CPUs; 1 scans in this process.
        on_progress: called after each shard.

    Raises:
        UserError: a shard cannot be read, or no shard has samples, images or captions.
    """
    processes = min(processes or os.cpu_count() or 1, len(paths))
    scans: list[Scan] = []
    with ExitStack() as stack:
        results: Iterable[Scan] = (_scan(path, options) for path in paths)
        if processes > 1:
            pool = stack.enter_context(process_pool(processes))
            results = pool.map(_scan, paths, [options] * len(paths), chunksize=1)
        for scan in results:
            scans.append(scan)
            log_loss(scan)
            on_progress(len(scans), len(paths))
    check_usable(scans, describe_paths(list(paths)))
    return extend(None, [scan.shard for scan in scans])


def _scan(path: str, options: ScanOptions) -> Scan:
    return scan_shard(path, options)[0]


def open_manifest(
    source: str,
    cache: Path,
    processes: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
    options: ScanOptions = ScanOptions(),
    allow_commands: bool = False,
) -> Manifest:
    """Open the manifest that `source` names: a manifest folder, or local shards as `resolve_shards` takes them.

    A manifest of local shards is built and kept in `cache` under a hash of the shards' paths, sizes and times, and
    reused until one of them changes. Several processes may do this at once. With `allow_commands` a manifest may hold
    `pipe:` commands, which its readers run.

    Raises:
        UserError: there is nothing usable, a shard is named twice, the shards are remote and need a manifest built in
            advance, or they are commands that nobody has allowed.
    """
    manifest = _open_manifest(source, cache, processes, on_progress, options, allow_commands)
    if manifest.samples is not None:
        _check_members(source, manifest.samples.members, options.captions)
    check_distinct(manifest)
    return manifest


def _check_members(source: str, members: Collection[str], captions: Sequence[str]) -> None:
    """Raise UserError unless sample tables have the places of the members that captions are read from."""
    missing = [name for name in Captions(captions).extensions if name not in members]
    if missing:
        raise UserError(
            f"The manifest {source} does not know where {', '.join(missing)} members are; build it again with "
            f"--captions {' '.join(captions)}."
        )


def _open_manifest(
    source: str,
    cache: Path,
    processes: int | None,
    on_progress: OnProgress,
    options: ScanOptions,
    allow_commands: bool,
) -> Manifest:
    if source and is_manifest(source):
        return load_manifest(source, allow_commands=allow_commands)
    paths = resolve_shards(source)
    remote = next((path for path in paths if not is_local(path)), None)
    if remote is not None:
        raise UserError(
            f"{remote} is remote: build the manifest once (neuclip-ds build-manifest FOLDER '{source}') "
            "and name its folder as the data."
        )
    folder = cache / _fingerprint(paths, options)
    if is_manifest(folder):
        return load_manifest(folder)
    manifest = build_manifest(paths, processes, on_progress, options)
    with explain_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(manifest, folder)
    return manifest


def _fingerprint(paths: Sequence[str], options: ScanOptions) -> str:
    digest = hashlib.sha256(f"{options}\n".encode())
    for path in paths:
        status = Path(path).stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


class Changes(NamedTuple):
    """The difference between a manifest and the shards that an update names."""

    new: dict[str, int | None]  # shards to append, among them those that changed, with their sizes where known
    removed: tuple[int, ...]  # numbers of the shards to mark as removed
    restored: tuple[int, ...]  # numbers of removed shards that are back


def find_changes(manifest: Manifest | None, paths: Sequence[str], sizes: Mapping[str, int | None] = {}) -> Changes:
    """Compare a manifest with `paths`: local shards by size, remote ones by `sizes`, or by name only where unknown."""
    shards = () if manifest is None else manifest.shards
    wanted = {path: Path(path).stat().st_size if is_local(path) else sizes.get(path) for path in paths}
    if len(wanted) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"{twice} is listed more than once; name every shard once.")
    current: dict[str, int] = {}  # the newest number of each path that is wanted and unchanged
    for number, shard in enumerate(shards):
        if shard.path in wanted and wanted[shard.path] in (None, shard.bytes):
            current[shard.path] = number
    kept = set(current.values())
    return Changes(
        {path: size for path, size in wanted.items() if path not in current},
        tuple(number for number, shard in enumerate(shards) if number not in kept and not shard.removed),
        tuple(sorted(number for number in kept if shards[number].removed)),
    )


def write_manifest(
    folder: Path,
    paths: Sequence[str],
    executor: Executor,
    options: ScanOptions = ScanOptions(),
    *,
    samples: bool = False,
    update: bool = False,
    skip_unreadable: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Manifest:
    """Build a manifest in `folder`, or resume an interrupted build.

    Args:
        folder: folder of the manifest; must hold one exactly when `update` is set.
        paths: shards, in the order in which they get indices.
        executor: its workers scan the shards: processes on this machine, or MPI ranks.
        options: what to scan for.
        samples: whether to store offsets and keys; always done with uids or checksums, in an update as before, and
            never with side files.
        update: append new shards and mark missing ones as removed.
        skip_unreadable: omit shards that cannot be used, and list them in FOLDER/unreadable_shards.jsonl.
        on_progress: called with the shards done, those of an interrupted build included.

    Raises:
        UserError: shards cannot be used, there is nothing to train on, or `folder` does not fit the options.
    """
    existing = _existing(folder, update, samples or bool(options.uids))
    samples = samples or bool(options.uids) or options.checksum if existing is None else existing.samples is not None
    if options.side_files and (samples or options.verify):
        raise UserError(
            "Sample tables, uids and images are read from the shards; omit --from-side-files, or the options that need "
            "them, or build a manifest in another folder."
        )
    if options.uids:
        UidFiles(options.uids).check_order()
    listed = list_shards(paths) if options.side_files else {}
    changes = find_changes(existing, paths, {path: shard.bytes for path, shard in listed.items()})
    first = existing.n_shards if existing else 0
    work = folder / _WORK
    found, failures = ResumableScan(work, options, samples).run(changes.new, listed, executor, on_progress)
    if failures and not (skip_unreadable and (found or existing)):
        raise UserError(
            f"{len(failures)} of {len(changes.new)} shards cannot be used. The first: {failures[0].reason} Fix them or "
            "omit them from the sources and run the same command again, which scans only what is missing; or set "
            "--skip-unreadable."
        )
    scans = [entry.scan for entry in found]
    for scan in scans:
        log_loss(scan)
    if existing is None:
        check_usable(scans, describe_paths(list(paths)))
    manifest = _merge(existing, changes, [scan.shard for scan in scans])
    check_distinct(manifest)
    _write_bad(folder / _BAD, manifest.shards[first:], scans, existing.n if existing else 0)
    _write_unreadable(folder / _UNREADABLE, failures)
    if samples:
        _write_parts(folder / SAMPLES, first, [entry.table for entry in found if entry.table is not None], executor)
    write_shards(manifest, folder)
    shutil.rmtree(work)
    return load_manifest(folder, allow_commands=True)  # which the caller has named


def _existing(folder: Path, update: bool, samples: bool) -> Manifest | None:
    """Return the manifest to update, or None to build a new one."""
    if not is_manifest(folder):
        if update:
            raise UserError(f"{folder} holds no manifest to update; omit --update to build one.")
        return None
    if not update:
        raise UserError(f"{folder} holds a manifest; update it with --update, or name another folder.")
    existing = load_manifest(folder, check_shards=False, allow_commands=True)  # only what is named now is read
    if samples and existing.samples is None:
        raise UserError(f"The manifest in {folder} has no sample tables; update it with the options it was built with.")
    return existing


def _write_parts(folder: Path, first: int, tables: Sequence[TablePlace], executor: Executor) -> None:
    """Write the sample tables of shards `first` and later, in place of those that an interrupted build has written."""
    with explain_disk(folder, RESUME):
        folder.mkdir(exist_ok=True)
        for _, last, path in list_parts(folder):
            if last >= first:
                path.unlink()
    writing = []
    size = min(_MAX_PART, max(1, len(tables) // _MIN_PARTS))
    for start in range(0, len(tables), size):
        chosen = tables[start : start + size]
        path = folder / part_name(first + start, first + start + len(chosen) - 1)
        writing.append(executor.submit(_write_part, path, chosen))
    for future in as_completed(writing):
        future.result()


def _write_part(path: Path, tables: Sequence[TablePlace]) -> None:
    with explain_disk(path, RESUME), atomic_write(path) as temporary:
        write_part(temporary, (table.read() for table in tables))


def _write_unreadable(path: Path, failures: Sequence[Failure]) -> None:
    """List the shards that are omitted, and log their number."""
    path.unlink(missing_ok=True)  # of an earlier update
    if failures:
        with atomic_write(path) as temporary:
            lines = [f"{redact(json.dumps(failure._asdict()))}\n" for failure in failures]
            temporary.write_text("".join(lines), encoding="utf-8")
        log.warning("%d shards cannot be used and are omitted; %s lists them", len(failures), path)


def _merge(existing: Manifest | None, changes: Changes, found: Sequence[Shard]) -> Manifest:
    if existing is None:
        return extend(None, found)
    shards = list(existing.shards)
    for number in changes.removed:
        shards[number] = shards[number]._replace(removed=True)
    for number in changes.restored:
        shards[number] = shards[number]._replace(removed=False)
    return extend(Manifest(shards), found)


def _write_bad(path: Path, shards: Sequence[Shard], scans: Sequence[Scan], first: int) -> None:
    """Write the bad samples of a verifying scan, after those already listed below index `first`."""
    known = path.read_bytes().decode("utf-8", "replace").splitlines() if path.is_file() else []
    try:
        lines = [line for line in known if json.loads(line)["index"] < first]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}, the list of bad samples, is damaged; remove it and run the command again.") from error
    for shard, scan in zip(shards, scans, strict=True):
        for bad in scan.bad:
            described = {"index": shard.start + bad.row, "shard": shard.path, **bad._asdict()}
            lines.append(redact(json.dumps(described)))
    if lines:
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
