"""Count the samples of shards from the files that img2dataset writes next to them, so that no tar is read.

`00000_stats.json` has the number of pairs in `00000.tar` ("successes"); where it is absent, the rows of `00000.parquet`
whose status is "success" are counted. Sizes of shards come from one listing of their folder, or from a request a shard
where a store has no listings (HTTP). Requests are made many at a time, so that a store's latency matters little.
"""

import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from neuclip_ds.data.failures import FailureKind, describe_error
from neuclip_ds.data.manifest import MIN_SAMPLE_BYTES, Shard
from neuclip_ds.data.scan import Scan
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_REQUESTS = 64  # at the same time, in each process
_ATTEMPTS = 5
_MAY_PASS = (FailureKind.OUTAGE, FailureKind.THROTTLED)
_TAR = ".tar"
_SIDES = ("_stats.json", ".parquet")  # in the order of preference
_BLOCK = 1 << 16  # bytes of a parquet file that are read at once


class ListedShard(NamedTuple):
    """A shard as the listing of its folder has it."""

    path: str
    bytes: int | None  # None where there is no listing
    sides: tuple[str, ...]  # side files to read, the first that exists


class _Failed(Exception):
    """A request failed, for the reason in the message; `absent` if there is no such file."""

    def __init__(self, reason: str, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent


def list_shards(paths: Sequence[str]) -> dict[str, ListedShard]:
    """List the folders of shards; return the shards by path.

    Raises:
        UserError: a path is not that of a tar.
    """
    if other := next((path for path in paths if path.startswith("pipe:") or not path.endswith(_TAR)), None):
        raise UserError(f"{other} is not the address of a .tar, so it has no side files; omit --from-side-files.")
    folders = sorted({path.rpartition("/")[0] for path in paths})
    stores = {folder: _store(folder) for folder in folders}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        listings = dict(zip(folders, pool.map(lambda folder: _list(folder, stores[folder]), folders), strict=True))
    return {path: _describe(path, listings[path.rpartition("/")[0]]) for path in paths}


def _list(folder: str, store: Any) -> dict[str, int] | None:
    """Return the sizes of a folder's files by name, or None if they cannot be had."""
    if folder.startswith(("http://", "https://")):
        return None  # pages with links have no sizes
    store.invalidate_cache()
    try:
        found = _request(lambda: store.ls(f"{folder}/", detail=True))
    except _Failed as failure:
        log.warning("%s cannot be listed (%s): shards are looked up one by one", folder, failure)
        return None
    return {entry["name"].rpartition("/")[2]: entry["size"] for entry in found if entry["type"] != "directory"}


def _describe(path: str, listing: Mapping[str, int] | None) -> ListedShard:
    sides = tuple(path.removesuffix(_TAR) + side for side in _SIDES)
    if listing is None:
        return ListedShard(path, None, sides)
    size = listing.get(path.rpartition("/")[2])
    return ListedShard(path, size, tuple(side for side in sides if side.rpartition("/")[2] in listing))


def count_shards(shards: Sequence[ListedShard]) -> list[Scan | UserError]:
    """Count the samples of shards, in a scan or the reason that it cannot be done."""
    folders = {shard.path.rpartition("/")[0] for shard in shards}
    stores = {folder: _store(folder) for folder in folders}  # made here: fsspec gives each thread others
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(lambda shard: _count(shard, stores[shard.path.rpartition("/")[0]]), shards))


def _store(folder: str) -> Any:
    """Return the fsspec file system of a folder."""
    options: dict[str, Any] = {}
    if folder.startswith("s3://"):
        configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {"max_pool_connections": _REQUESTS, **configured}  # botocore's default is 10
        options["max_concurrency"] = 1  # of parts of a file; with more, its size is requested first
    try:
        return fsspec.core.url_to_fs(folder or "/", **options)[0]
    except (ValueError, ImportError) as error:
        raise UserError(f"{folder}: {describe_error(error)}.") from error


def _count(shard: ListedShard, store: Any) -> Scan | UserError:
    try:
        n = _samples(shard, store)
        size = shard.bytes if shard.bytes is not None else _request(partial(store.size, shard.path))
    except _Failed as failure:
        return UserError(f"Shard {shard.path} cannot be counted: {failure}.")
    if not isinstance(size, int):
        return UserError(f"The server does not report the size of {shard.path}; omit --from-side-files.")
    if n * MIN_SAMPLE_BYTES > size:
        return UserError(f"The side file of {shard.path} has {n} samples, but the shard only {size} bytes.")
    return Scan(Shard(shard.path, 0, n, size), n_images=n, n_captions=n, extensions=(), lost_bytes=0, bad=())


def _samples(shard: ListedShard, store: Any) -> int:
    """Return the number of samples that the side files of a shard give."""
    for side in shard.sides:
        read = _successes if side.endswith(_SIDES[0]) else _rows
        try:
            return _request(partial(read, store, side))
        except _Failed as failure:
            if not failure.absent:
                raise _Failed(f"{side}: {failure}") from failure
    names = " or ".join(shard.path.rpartition("/")[2].removesuffix(_TAR) + side for side in _SIDES)
    raise _Failed(f"no {names} is next to it, which img2dataset writes when a shard is complete")


def _successes(store: Any, path: str) -> int:
    data = store.cat_file(path)
    try:
        found = json.loads(data)["successes"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _Failed('it is not JSON with "successes"') from error
    if type(found) is not int or found < 0:
        raise _Failed(f'"successes" is {found!r}')
    return found


def _rows(store: Any, path: str) -> int:
    with store.open(path, "rb", block_size=_BLOCK) as file:
        try:
            status = pq.read_table(file, columns=["status"]).column("status")
            return int(pc.sum(pc.equal(status, "success")).as_py() or 0)
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise _Failed('it is not a parquet file with a column "status"') from error


def _request(work: Callable[[], Value]) -> Value:
    """Return what `work` returns, repeated after errors that may pass; raise _Failed."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return work()
        except _Failed:
            raise
        except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
            failure = describe_error(error)
            if failure.kind not in _MAY_PASS or attempt == _ATTEMPTS:
                raise _Failed(str(failure), failure.kind is FailureKind.MISSING) from error
        time.sleep(2 ** (attempt - 1) * random.uniform(0.5, 1))  # seconds, other ones in each thread
    raise AssertionError("unreachable")
