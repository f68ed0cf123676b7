"""Scan shards with many workers, which keep what they find in a journal; only shards that it lacks are scanned."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.atomic_write import atomic_write
from neuclip_ds.data.disk import explain_disk
from neuclip_ds.data.journal import Entry, append, read_journal
from neuclip_ds.data.scan import Scan, ScanOptions, scan_shard
from neuclip_ds.data.side_files import ListedShard, count_shards
from neuclip_ds.errors import UserError

OnProgress = Callable[[int, int], None]  # (shards done, total shards)

_OPTIONS = "options.json"
_COUNTED_SHARDS = 512  # shards that a worker counts by their side files at once


class Failure(NamedTuple):
    """A shard that cannot be used."""

    shard: str
    reason: str


class ResumableScan:
    """The scans of a build.

    Args:
        folder: folder of the journal, created if absent; one that was begun with other options is emptied.
        options: what to scan for.
        samples: whether to keep sample tables.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, options: ScanOptions, samples: bool) -> None:
        self._folder, self._options, self._samples = folder, options, samples
        text = json.dumps({"options": options._asdict(), "samples": samples})
        with explain_disk(folder, "name another folder"):
            if (folder / _OPTIONS).is_file() and (folder / _OPTIONS).read_bytes() == text.encode():
                return
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)  # URLs may hold secrets
            with atomic_write(folder / _OPTIONS) as temporary:
                temporary.write_text(text)

    def run(
        self,
        sizes: Mapping[str, int | None],
        listed: Mapping[str, ListedShard],
        executor: Executor,
        on_progress: OnProgress,
    ) -> tuple[list[Entry], list[Failure]]:
        """Scan shards; return what was found, and those that cannot be used, both in the order of the shards.

        Args:
            sizes: the shards' paths, with their bytes where known.
            listed: the same shards as their folders list them; for side files only.
            executor: its workers scan.
            on_progress: called with the shards done, those in the journal included.

        Raises:
            UserError: a shard has changed meanwhile, or the journal is damaged or cannot be written.
        """
        known = self._entries(sizes)
        missing = [path for path in sizes if path not in known]
        done = len(sizes) - len(missing)
        on_progress(done, len(sizes))
        pending: dict[Future[list[Failure]], int] = {}
        if self._options.side_files:
            for start in range(0, len(missing), _COUNTED_SHARDS):
                shards = [listed[path] for path in missing[start : start + _COUNTED_SHARDS]]
                pending[executor.submit(_count, self._folder, shards)] = len(shards)
        else:
            for path in missing:
                pending[executor.submit(_scan, self._folder, path, self._options, self._samples)] = 1
        failures: dict[str, Failure] = {}
        try:
            for future in as_completed(pending):
                failures.update((failure.shard, failure) for failure in future.result())
                done += pending[future]
                on_progress(done, len(sizes))
        finally:  # after Ctrl-C or a worker's error, do not wait for shards that have not started
            for future in pending:
                future.cancel()
        found = self._entries(sizes)
        if changed := next((path for path in sizes if path not in found and path not in failures), None):
            raise UserError(f"Shard {changed} has changed while it was scanned; run the same command again.")
        return list(found.values()), [failures[path] for path in missing if path in failures]

    def _entries(self, sizes: Mapping[str, int | None]) -> dict[str, Entry]:
        """Return the journal's entries for shards of these paths and sizes, in their order."""
        journal = read_journal(self._folder)
        return {
            path: journal[path]
            for path, size in sizes.items()
            if path in journal and size in (None, journal[path].scan.shard.bytes)
        }


def _scan(folder: Path, path: str, options: ScanOptions, samples: bool) -> list[Failure]:
    """Scan a shard into the journal, in a worker."""
    try:
        scan, table = scan_shard(path, options)
    except UserError as error:
        return [Failure(path, str(error))]
    append(folder, [(scan, table if samples else None)])
    return []


def _count(folder: Path, shards: Sequence[ListedShard]) -> list[Failure]:
    """Count shards by their side files into the journal, in a worker."""
    counted = list(zip(shards, count_shards(shards), strict=True))
    append(folder, [(scan, None) for _, scan in counted if isinstance(scan, Scan)])
    return [Failure(shard.path, str(error)) for shard, error in counted if isinstance(error, UserError)]
