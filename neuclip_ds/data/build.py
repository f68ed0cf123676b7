"""Build manifests: in memory when a run starts, or on disk with many processes for large data sets.

On disk the shards are scanned in groups. A worker writes the result of a group to `FOLDER/.building/` (and the group's
sample tables to their final place), so an interrupted build resumes with the missing groups. Indices are assigned at
the end in the order of the paths, whatever the order in which groups finished.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.children import process_pool
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.manifest import SAMPLES, Manifest, Shard, extend, is_manifest, load_manifest, write_shards
from neuclip_ds.data.repeats import check_distinct
from neuclip_ds.data.sample_table import list_parts, part_name, write_part
from neuclip_ds.data.scan import BadRow, Scan, ScanOptions, check_usable, describe_paths, log_loss, scan_shard
from neuclip_ds.data.shards import is_local, resolve_shards
from neuclip_ds.data.uids import UidFiles
from neuclip_ds.errors import UserError
from neuclip_ds.redaction import redact

OnProgress = Callable[[int, int], None]  # (shards done, total shards)

_MAX_GROUP = 64  # shards of a group, and row groups in a part of the sample tables
_MIN_GROUPS = 64  # so that many workers have work and a restart repeats little
_WORK = ".building"
_PLAN = "plan.json"
_BAD = "bad_samples.jsonl"


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
    check_distinct(manifest)
    return manifest


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

    new: tuple[str, ...]  # shards to append, among them those that changed
    removed: tuple[int, ...]  # numbers of the shards to mark as removed
    restored: tuple[int, ...]  # numbers of removed shards that are back


def find_changes(manifest: Manifest | None, paths: Sequence[str]) -> Changes:
    """Compare a manifest with `paths`: local shards by size, remote ones by name only."""
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
    """A group of new shards that one worker scans, and where it writes the results."""

    number: int
    paths: tuple[str, ...]
    options: ScanOptions
    result: Path
    part: Path | None  # file of the sample tables


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
    """Build a manifest in `folder`, or resume an interrupted build.

    Args:
        folder: folder of the manifest; must hold one exactly when `update` is set.
        paths: shards, in the order in which they get indices.
        executor: its workers scan the shards: processes on this machine, or MPI ranks.
        options: what to scan for.
        samples: whether to store offsets and keys; always done with uids or checksums, in an update as before.
        update: append new shards and mark missing ones as removed.
        on_progress: called with the shards done, those of an interrupted build included.

    Raises:
        UserError: shards cannot be read, there is nothing to train on, or `folder` does not fit `update`.
    """
    existing = _existing(folder, update, samples or bool(options.uids))
    samples = samples or bool(options.uids) or options.checksum if existing is None else existing.samples is not None
    if options.uids:
        UidFiles(options.uids).check_order()
    changes = find_changes(existing, paths)
    first = existing.n_shards if existing else 0
    groups = _make_groups(folder, changes.new, options, samples, first)
    _run(groups, executor, len(changes.new), on_progress)
    scans = _collect(groups)
    if existing is None:
        check_usable(scans, describe_paths(list(paths)))
    manifest = _merge(existing, changes, [scan.shard for scan in scans])
    check_distinct(manifest)
    _write_bad(folder / _BAD, manifest.shards[first:], scans, existing.n if existing else 0)
    write_shards(manifest, folder)
    shutil.rmtree(folder / _WORK)
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


def _make_groups(folder: Path, paths: Sequence[str], options: ScanOptions, samples: bool, first: int) -> list[_Group]:
    """Divide the shards into groups; results of an interrupted build with the same arguments are kept."""
    work = folder / _WORK
    plan = {"first": first, "options": options._asdict(), "samples": samples, "paths": list(paths)}
    text = json.dumps(plan)
    if not (work / _PLAN).is_file() or (work / _PLAN).read_bytes() != text.encode():
        shutil.rmtree(work, ignore_errors=True)
        for _, last, path in list_parts(folder / SAMPLES):
            if last >= first:
                path.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        work.mkdir(mode=0o700)  # URLs may hold secrets
        with atomic_write(work / _PLAN) as temporary:
            temporary.write_text(text)
    if samples:
        (folder / SAMPLES).mkdir(exist_ok=True)
    groups = []
    size = min(_MAX_GROUP, max(1, len(paths) // _MIN_GROUPS))
    for number, start in enumerate(range(0, len(paths), size)):
        chosen = tuple(paths[start : start + size])
        name = part_name(first + start, first + start + len(chosen) - 1)
        part = folder / SAMPLES / name if samples else None
        groups.append(_Group(number, chosen, options, work / f"group-{number:06d}.json", part))
    return groups


def _run(groups: Sequence[_Group], executor: Executor, total: int, on_progress: OnProgress) -> None:
    done = sum(len(group.paths) for group in groups if group.result.is_file())
    on_progress(done, total)
    pending = {executor.submit(_scan_group, group): group for group in groups if not group.result.is_file()}
    failures: list[str] = []
    try:
        for future in as_completed(pending):
            failures += future.result()
            done += len(pending[future].paths)
            on_progress(done, total)
    finally:  # after Ctrl-C or a worker's error, do not wait for groups that have not started
        for future in pending:
            future.cancel()
    if failures:
        raise UserError(
            f"{len(failures)} of {total} shards cannot be used. The first: {failures[0]} Fix them and run the same "
            "command again, which resumes with them, or omit them from the sources."
        )


def _scan_group(group: _Group) -> list[str]:
    """Scan a group and write the results; if shards fail, return their errors and write nothing."""
    found, failures = [], []
    for path in group.paths:
        try:
            found.append(scan_shard(path, group.options))
        except UserError as error:
            failures.append(str(error))
    if failures:
        return failures
    if group.part is not None:
        with atomic_write(group.part) as temporary:
            write_part(temporary, [table for _, table in found])
    with atomic_write(group.result) as temporary:
        temporary.write_text(json.dumps([scan for scan, _ in found]))
    return []


def _collect(groups: Sequence[_Group]) -> list[Scan]:
    """Read the results of all groups and log what is wrong with their shards."""
    scans = [scan for group in groups for scan in _read_result(group)]
    for scan in scans:
        log_loss(scan)
    return scans


def _read_result(group: _Group) -> list[Scan]:
    try:
        scans = [
            Scan(Shard(*shard), images, captions, tuple(extensions), lost, tuple(BadRow(*row) for row in bad))
            for shard, images, captions, extensions, lost, bad in json.loads(group.result.read_bytes())
        ]
    except (ValueError, TypeError) as error:
        raise _damaged(group.result) from error
    if [scan.shard.path for scan in scans] != list(group.paths):
        raise _damaged(group.result)
    return scans


def _damaged(result: Path) -> UserError:
    return UserError(f"{result}, a result of an interrupted build, is damaged; remove it and run the command again.")


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
