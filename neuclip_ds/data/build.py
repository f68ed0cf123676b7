"""Builds manifests: in memory at the start of a run, or on disk, by many processes, restartable, for large data sets.

On disk the work is cut into groups of shards. What a worker finds in a group it writes to `FOLDER/.building/` (and the
group's sample tables straight to their place), so that a build that was interrupted goes on with the groups that are
missing. Indices are given out at the end, in the order of the paths, whatever the order in which groups were done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.manifest import (
    SAMPLES,
    Manifest,
    Shard,
    extend,
    is_manifest,
    load_manifest,
    write_shards,
)
from neuclip_ds.data.sample_table import list_parts, part_name, write_part
from neuclip_ds.data.scan import BadRow, Scan, ScanOptions, check_usable, describe_loss, scan_shard, where
from neuclip_ds.data.shards import is_local, resolve_shards
from neuclip_ds.data.uids import UidFiles
from neuclip_ds.errors import UserError

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # (shards done, shards in all)

_GROUP = 64  # shards at most; as many row groups in a part of the sample tables
_LEAST_GROUPS = 64  # so that many workers have work, and a restart repeats little
_WORK = ".building"
_PLAN = "plan.json"
_BAD = "bad_samples.jsonl"


def build_manifest(
    paths: Sequence[str],
    processes: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
    options: ScanOptions = ScanOptions(),
) -> Manifest:
    """A manifest in memory, of the tars `paths` in their order.

    Args:
        processes: workers to look through the shards, as many as CPUs by default; 1 does it in this process.
        on_progress: called after each shard.

    Raises:
        UserError: a shard cannot be read, or there are no samples, no images or no captions in all of them.
    """
    processes = min(processes or os.cpu_count() or 1, len(paths))
    scans: list[Scan] = []
    with ExitStack() as stack:
        results: Iterable[Scan] = (_scan(path, options) for path in paths)
        if processes > 1:
            pool = stack.enter_context(ProcessPoolExecutor(processes))
            results = pool.map(_scan, paths, [options] * len(paths), chunksize=1)
        for scan in results:
            scans.append(scan)
            _warn(scan)
            on_progress(len(scans), len(paths))
    check_usable(scans, where(list(paths)))
    return extend(None, [scan.shard for scan in scans])


def _scan(path: str, options: ScanOptions) -> Scan:
    return scan_shard(path, options)[0]


def _warn(scan: Scan) -> None:
    loss = describe_loss(scan)
    if loss:
        logger.warning(loss)


def open_manifest(
    source: str,
    cache: Path,
    processes: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
    options: ScanOptions = ScanOptions(),
) -> Manifest:
    """The manifest that `source` names: a manifest folder, or any form of local shards that `resolve_shards` takes.

    In the second case it is built and kept in `cache`, under a name that holds the shards' paths, sizes and times,
    so that it is used again until one of them changes. Several processes may do this at once.

    Raises:
        UserError: there is nothing usable, or the shards are remote, of which a manifest has to be built before.
    """
    if source and is_manifest(source):
        return load_manifest(source)
    paths = resolve_shards(source)
    remote = next((path for path in paths if not is_local(path)), None)
    if remote is not None:
        raise UserError(
            f"{remote} is remote: build the manifest once (python tools/build_manifest.py FOLDER '{source}') "
            "and name its folder as the data."
        )
    folder = cache / _fingerprint(paths, options)
    if is_manifest(folder):
        return load_manifest(folder)
    manifest = build_manifest(paths, processes, on_progress, options)
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
    """What an update does to a manifest."""

    new: tuple[str, ...]  # shards that are appended; a shard that changed is one of them
    removed: tuple[int, ...]  # shard numbers that get tombstones
    restored: tuple[int, ...]  # shard numbers whose tombstones go


def find_changes(manifest: Manifest | None, paths: Sequence[str]) -> Changes:
    """What makes a manifest one of `paths`: local shards are compared by their sizes, remote ones by their names."""
    shards = () if manifest is None else manifest.shards
    wanted = {path: Path(path).stat().st_size if is_local(path) else None for path in paths}
    if len(wanted) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"{twice} is listed more than once; name every shard once.")
    current: dict[str, int] = {}  # the newest number of each path that is wanted and unchanged
    for number, shard in enumerate(shards):
        if shard.path in wanted and wanted[shard.path] in (None, shard.bytes):
            current[shard.path] = number
    kept = set(current.values())
    return Changes(
        tuple(path for path in paths if path not in current),
        tuple(number for number, shard in enumerate(shards) if number not in kept and not shard.removed),
        tuple(sorted(number for number in kept if shards[number].removed)),
    )


class _Group(NamedTuple):
    """A piece of work: some of the new shards, and where its results go."""

    number: int
    paths: tuple[str, ...]
    options: ScanOptions
    result: Path
    part: Path | None  # of the sample tables


def write_manifest(
    folder: Path,
    paths: Sequence[str],
    executor: Executor,
    options: ScanOptions = ScanOptions(),
    *,
    samples: bool = False,
    update: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Manifest:
    """Builds a manifest in `folder`, or goes on with one whose building was interrupted.

    Args:
        folder: where the manifest is to be; with `update`, where it is.
        paths: its shards, in the order in which they get indices.
        executor: whose workers look through the shards: processes of this machine, or MPI ranks.
        options: what is looked at.
        samples: whether the manifest has the samples' offsets and keys; with uids it always has.
        update: give indices to shards that are new, tombstones to those that are gone.
        on_progress: called with the shards done, those of an interrupted build included.

    Raises:
        UserError: shards cannot be read (all others are done, and a restart takes up just these), there is nothing
            to train on, or `folder` holds a manifest and `update` is not set.
    """
    existing = _existing(folder, update)
    if existing is not None and (existing.samples is not None) != (samples or bool(options.uids)):
        held = "has" if existing.samples is not None else "has no"
        raise UserError(f"The manifest in {folder} {held} sample tables; update it with the options it was built with.")
    samples = samples or bool(options.uids)
    if options.uids:
        UidFiles(options.uids).check_order()
    changes = find_changes(existing, paths)
    first = 0 if existing is None else existing.n_shards
    groups = _plan(folder, changes.new, options, samples, first)
    _run(groups, executor, len(changes.new), on_progress)
    scans = [scan for group in groups for scan in _read(group.result)]
    if existing is None:
        check_usable(scans, where(list(paths)))
    for scan in scans:
        _warn(scan)
    manifest = _merge(existing, changes, [scan.shard for scan in scans])
    _write_bad(folder / _BAD, manifest.shards[first:], scans, 0 if existing is None else existing.n)
    write_shards(manifest, folder)
    shutil.rmtree(folder / _WORK)
    return load_manifest(folder)


def _existing(folder: Path, update: bool) -> Manifest | None:
    if not is_manifest(folder):
        if update:
            raise UserError(f"{folder} holds no manifest that could be updated; leave out --update to build one.")
        return None
    if not update:
        raise UserError(f"{folder} holds a manifest; update it with --update, or name another folder.")
    return load_manifest(folder, check_shards=False)


def _plan(folder: Path, paths: Sequence[str], options: ScanOptions, samples: bool, first: int) -> list[_Group]:
    """The groups of work; results of an interrupted build are kept where it had the same plan."""
    work = folder / _WORK
    plan = {"first": first, "options": options._asdict(), "samples": samples, "paths": list(paths)}
    text = json.dumps(plan)
    if not (work / _PLAN).is_file() or (work / _PLAN).read_text() != text:
        shutil.rmtree(work, ignore_errors=True)
        for _, last, path in list_parts(folder / SAMPLES):
            if last >= first:
                path.unlink()
        work.mkdir(parents=True)
        with atomic_write(work / _PLAN) as aside:
            aside.write_text(text)
    if samples:
        (folder / SAMPLES).mkdir(exist_ok=True)
    groups = []
    size = min(_GROUP, max(1, len(paths) // _LEAST_GROUPS))
    for number, start in enumerate(range(0, len(paths), size)):
        chosen = tuple(paths[start : start + size])
        name = part_name(first + start, first + start + len(chosen) - 1)
        part = folder / SAMPLES / name if samples else None
        groups.append(_Group(number, chosen, options, work / f"group-{number:06d}.json", part))
    return groups


def _run(groups: Sequence[_Group], executor: Executor, total: int, on_progress: OnProgress) -> None:
    done = sum(len(group.paths) for group in groups if group.result.is_file())
    on_progress(done, total)
    pending = {executor.submit(_work, group): group for group in groups if not group.result.is_file()}
    failures: list[str] = []
    try:
        for future in as_completed(pending):
            failures += future.result()
            done += len(pending[future].paths)
            on_progress(done, total)
    finally:  # at Ctrl-C, or at a worker's error: what has not begun is not waited for
        for future in pending:
            future.cancel()
    if failures:
        raise UserError(
            f"{len(failures)} of {total} shards cannot be used; the same command goes on with them when they are "
            f"mended, or leave them out. The first: {failures[0]}"
        )


def _work(group: _Group) -> list[str]:
    """Looks through a group and writes what it finds; mistakes met instead, of which the group is then to be redone."""
    found, failures = [], []
    for path in group.paths:
        try:
            found.append(scan_shard(path, group.options))
        except UserError as error:
            failures.append(str(error))
    if failures:
        return failures
    if group.part is not None:
        with atomic_write(group.part) as aside:
            write_part(aside, [table for _, table in found])
    with atomic_write(group.result) as aside:
        aside.write_text(json.dumps([scan for scan, _ in found]))
    return []


def _read(result: Path) -> list[Scan]:
    return [
        Scan(Shard(*shard), images, captions, tuple(extensions), lost, tuple(BadRow(*row) for row in bad))
        for shard, images, captions, extensions, lost, bad in json.loads(result.read_text())
    ]


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
    """Puts what a verifying scan found behind what is listed of the samples before index `first`."""
    known = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    lines = [line for line in known if json.loads(line)["index"] < first]
    for shard, scan in zip(shards, scans, strict=True):
        for bad in scan.bad:
            lines.append(json.dumps({"index": shard.start + bad.row, "shard": shard.path, **bad._asdict()}))
    if lines:
        with atomic_write(path) as aside:
            aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
