"""Scan groups of shards with many workers; a scan that is interrupted continues after the groups it has finished.

The results of a group are a file of JSON, named by a hash of the options, and one of sample tables. A file that an
interrupted write has cut is ignored, and its shards are scanned again.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from pathlib import Path

from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.sample_table import SampleTable, write_part
from neuclip_ds.data.scan import Scan, ScanOptions, Scans, scan_shard
from neuclip_ds.data.side_files import count_shards
from neuclip_ds.errors import UserError
from neuclip_ds.files import atomic_write, explain_disk

OnProgress = Callable[[int, int], None]  # (shards done, total shards)
RESUME = "run the same command again, which resumes"

_MAX_GROUP = 64  # shards that a worker scans at once, whose tables are in one file
GROUPS = 1024  # the number of groups aimed at
_COUNTED = 512  # shards that a worker counts by their side files at once


def scan_shards(
    results: Path,
    tables: Path | None,
    sizes: Mapping[str, int | None],
    options: ScanOptions,
    executor: Executor,
    on_progress: OnProgress,
) -> Scans:
    """Scan shards; return their scans, and the reasons why others cannot be used, both in the order of the shards.

    Args:
        results: folder for the results of finished groups.
        tables: folder for the sample tables; None to keep none.
        sizes: the shards' paths, with their bytes where known.
        on_progress: called with the shards done, those of an interrupted scan included.
    """
    key = hashlib.sha256(f"{options} {tables is not None}".encode()).hexdigest()[:16]
    with explain_disk(results, "name another folder"):
        (tables or results.parent).mkdir(parents=True, exist_ok=True)
        results.mkdir(mode=0o700, exist_ok=True)  # URLs may hold secrets
    found = {scan.shard.path: scan for path in results.glob(f"{key}-*.json") for scan in _read(path, tables)}
    found = {path: one for path, one in found.items() if path in sizes and sizes[path] in (None, one.shard.bytes)}
    failures: dict[str, str] = {}
    missing = [path for path in sizes if path not in found]
    length = _COUNTED if options.side_files else min(_MAX_GROUP, 1 + len(missing) // GROUPS)
    pending: list[Future[Scans]] = []
    on_progress(len(found), len(sizes))
    try:
        for start in range(0, len(missing), length):
            group = missing[start : start + length]
            if options.side_files:
                pending.append(executor.submit(count_shards, {path: sizes[path] for path in group}))
            else:
                part = None if tables is None else tables / f"part-{start:08d}-{uuid.uuid4().hex[:8]}.parquet"
                pending.append(executor.submit(_scan, group, options, part))
        for future in as_completed(pending):
            scans, failed = future.result()
            found |= {scan.shard.path: scan for scan in scans}
            failures |= failed
            path = results / f"{key}-{uuid.uuid4().hex}.json"
            with explain_disk(path, RESUME):
                path.write_text(json.dumps(scans), encoding="utf-8")
            on_progress(len(found) + len(failures), len(sizes))
    finally:  # after Ctrl-C or a worker's error, do not wait for shards that have not started
        for future in pending:
            future.cancel()
    if changed := next((path for path in found if sizes[path] not in (None, found[path].shard.bytes)), None):
        raise UserError(f"Shard {changed} has changed while it was scanned; run the same command again.")
    return [found[path] for path in sizes if path in found], {p: failures[p] for p in sizes if p in failures}


def _scan(paths: Sequence[str], options: ScanOptions, part: Path | None) -> Scans:
    """Scan shards in a worker, and write their sample tables to the file `part`."""
    scans: list[Scan] = []
    tables: list[SampleTable] = []
    failures: dict[str, str] = {}
    for path in paths:
        try:
            scan, table = scan_shard(path, options)
        except UserError as error:
            failures[path] = str(error)
        else:
            scans.append(scan if part is None else scan._replace(place=(part.name, len(tables))))
            tables.append(table)
    if part is not None and tables:
        with explain_disk(part, RESUME), atomic_write(part) as temporary:
            write_part(temporary, tables)
    return scans, failures


def _read(path: Path, tables: Path | None) -> list[Scan]:
    """Return the scans of a group, without those whose sample tables are gone."""
    try:
        scans = [Scan(Shard(*shard), *others) for shard, *others in json.loads(path.read_bytes())]
    except ValueError:
        return []
    return [scan for scan in scans if tables is None or (scan.place and (tables / scan.place[0]).is_file())]
