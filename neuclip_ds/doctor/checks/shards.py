"""Read speed of the user's shards, as local files past the page cache or fetched from remote storage."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from neuclip_ds.data.fetch import FetchError, fetch
from neuclip_ds.data.fetch import Request as FetchRequest
from neuclip_ds.data.manifest import is_manifest, load_manifest
from neuclip_ds.data.scan import ScanOptions, scan_shard
from neuclip_ds.data.shards import is_local, resolve_shards
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.doctor.finding import Finding, fine, warning, wrong
from neuclip_ds.doctor.request import Request
from neuclip_ds.planning.data_flow import RATE

_SECONDS = 5.0
_READERS = 8
_BLOCK = 4 << 20


class Sample(NamedTuple):
    """A part of the shards."""

    paths: Sequence[str]
    pair_bytes: float  # mean of a pair, in a shard


def examine(request: Request, communicator: Communicator) -> Iterator[Finding]:
    if not request.shards:
        return
    sample = choose(request.shards, request.config.data.allow_commands)
    local = is_local(sample.paths[0])
    try:
        speed = (read_per_second if local else fetched_per_second)(sample.paths)
    except (OSError, FetchError) as error:
        yield wrong(f"{sample.paths[0]} cannot be read: {error}", "Check the path, the network and the credentials.")
        return
    pairs = speed / sample.pair_bytes
    yield fine(figures={"shards, MB/s": speed / 1e6, "shards, pairs/s": pairs})
    if pairs < RATE:
        yield warning(
            f"Shards arrive at {speed / 1e6:,.0f} MB/s, {pairs:,.0f} pairs/s; a node with GPUs may train on {RATE:,}.",
            "Use a local disk (data.cache_local, data.cache_dir), more data.transfers, or storage with more bandwidth.",
        )


def choose(source: str, allow_commands: bool = False, most: int = _READERS) -> Sample:
    """Return some shards of a source, which is a manifest or what `resolve_shards` takes.

    Raises:
        UserError: there is none, or the first cannot be read.
    """
    if is_manifest(source):
        shards = [shard for shard in load_manifest(source, allow_commands=allow_commands).shards if not shard.removed]
        size = sum(shard.bytes for shard in shards) / max(1, sum(shard.n for shard in shards))
        return Sample([shard.path for shard in shards[:most]], size)
    paths = resolve_shards(source, allow_commands)
    first = scan_shard(paths[0], ScanOptions())[0].shard
    return Sample(paths[:most], first.bytes / max(1, first.n))


def read_per_second(paths: Sequence[str], seconds: float = _SECONDS) -> float:
    """Return bytes a second that a node reads of local files, one thread each, for at most so long."""
    deadline = time.perf_counter() + seconds

    def read(path: str) -> int:
        fd, done = os.open(path, os.O_RDONLY), 0
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what the page cache holds is no speed of the disk
            while time.perf_counter() < deadline and (block := os.pread(fd, _BLOCK, done)):
                done += len(block)
        finally:
            os.close(fd)
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        total = sum(pool.map(read, paths))
    return total / (time.perf_counter() - began)


def fetched_per_second(paths: Sequence[str], timeout: float = 30.0) -> float:
    """Return bytes a second at which a remote shard arrives.

    Raises `FetchError` if it does not.
    """
    with tempfile.TemporaryDirectory(prefix="neuclip_ds_doctor-") as folder:
        target = Path(folder) / "shard"
        began = time.perf_counter()
        fetch(FetchRequest(paths[0], None, timeout, retries=1), target)
        return target.stat().st_size / (time.perf_counter() - began)
