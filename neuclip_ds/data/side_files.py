"""Count the samples in shards without reading the tars, using the files that img2dataset writes next to each tar.

`00000_stats.json` gives the number of pairs in `00000.tar` as "successes". If that file is absent, the rows with status
"success" in `00000.parquet` are counted. Many requests are made concurrently, so latency matters little.
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from neuclip_ds.data.fetch import FIX_OF_ADDRESS, AttemptFailed, explain, open_remote
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.manifest_file import MIN_SAMPLE_BYTES
from neuclip_ds.data.scan import Scan, Scans
from neuclip_ds.errors import UserError

Value = TypeVar("Value")

_REQUESTS = 64  # simultaneous requests per process
_ATTEMPTS = 5
_TIMEOUT = 150.0  # seconds; a request to a web server fails after twice this time without progress
_TAR = ".tar"
_BLOCK = 1 << 16  # bytes of a parquet file that are read at once


def check_names(paths: Sequence[str]) -> None:
    """Raise UserError unless every path ends in .tar, because only tars have side files."""
    if other := next((path for path in paths if not path.endswith(_TAR)), None):
        raise UserError(f"{other} does not end in .tar, so it has no side files; omit --from-side-files.")


def count_shards(sizes: Mapping[str, int | None]) -> Scans:
    """Count the samples in shards using their side files; return the scans, and the reason for each shard that failed.

    `sizes` maps a shard's path to its size in bytes; if the size is None, it is requested from the storage service.
    Raises UserError if the address of a folder is invalid, or if its fsspec backend is not installed.
    """
    stores = {folder: _store(folder) for folder in {path.rpartition("/")[0] for path in sizes}}  # shared by all threads
    failures: dict[str, str] = {}

    def count(path: str) -> Scan | None:
        store = stores[path.rpartition("/")[0]]
        try:
            n = _samples(path.removesuffix(_TAR), store)
            size = sizes[path] or _size(path, store)
            if n * MIN_SAMPLE_BYTES > size:
                raise AttemptFailed(f"its side file lists {n} samples, but the shard is only {size} bytes long")
        except AttemptFailed as failure:
            failures[path] = f"The samples of shard {path} cannot be counted: {failure}."
            return None
        return Scan(shard=Shard(path=path, start=0, n=n, bytes=size), n_images=n, n_captions=n)

    with ThreadPoolExecutor(_REQUESTS) as pool:
        scans = [scan for scan in pool.map(count, sizes) if scan is not None]
    return scans, failures


def _store(folder: str) -> Any:
    try:
        store, _ = open_remote(folder or "/", _TIMEOUT, connections=_REQUESTS)
        return store
    except (ValueError, ImportError) as error:
        raise UserError(f"{folder} cannot be opened: {explain(error)}. {FIX_OF_ADDRESS}.") from error


def _size(path: str, store: Any) -> int:
    size = _request(partial(store.size, path))
    if not isinstance(size, int):
        raise AttemptFailed("the server does not report the shard's size; omit --from-side-files")
    return size


def _samples(stem: str, store: Any) -> int:
    """Return the number of samples in a shard according to the first of its side files that exists."""
    for path, read in ((f"{stem}_stats.json", _successes), (f"{stem}.parquet", _successful_rows)):
        try:
            return _request(partial(read, store, path))
        except AttemptFailed as failure:
            if failure.kind != "missing":
                raise AttemptFailed(f"{path}: {failure}") from failure
    name = stem.rpartition("/")[2]
    raise AttemptFailed(f"neither {name}_stats.json nor {name}.parquet, which img2dataset writes, is next to the tar")


def _successes(store: Any, path: str) -> int:
    """Return the number of pairs that img2dataset's statistics of a shard (JSON) report."""
    data = store.cat_file(path)
    try:
        successes = json.loads(data)["successes"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise AttemptFailed('it is not JSON with the key "successes"') from error
    if type(successes) is not int or successes < 0:
        raise AttemptFailed(f'its "successes" is {successes!r}, not a number of samples')
    return successes


def _successful_rows(store: Any, path: str) -> int:
    """Return the number of rows with status "success" in img2dataset's metadata file of a shard (parquet)."""
    with store.open(path, "rb", block_size=_BLOCK) as file:
        try:
            status = pq.read_table(file, columns=["status"]).column("status")
            return int(pc.sum(pc.equal(status, "success")).as_py() or 0)
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise AttemptFailed('it is not a parquet file with a "status" column') from error


def _request(work: Callable[[], Value]) -> Value:
    """Return the result of `work`; raise AttemptFailed after a permanent error or five transient ones."""
    failures = 0
    while True:
        try:
            return work()
        except AttemptFailed:
            raise
        except Exception as error:  # backends raise many types: botocore's, aiohttp's, OSError
            failure = explain(error)
            failures += 1
            if failure.kind != "outage" or failures == _ATTEMPTS:
                raise failure from error
        longest_pause = 2 ** (failures - 1)
        time.sleep(longest_pause * random.uniform(0.5, 1))
