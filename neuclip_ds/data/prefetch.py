"""Prefetch the shards that a node will read into its cache, in one process per node.

The order of samples is a pure function (neuclip_ds/data/order.py), so the process only needs the step that training has
reached.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_longlong
from typing import NoReturn

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.request_window import RequestWindow
from neuclip_ds.data.shard_requests import ShardRequest
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

_POLL = 0.1  # seconds between reads of the step


class Prefetcher:
    """A process that fetches shards ahead of training; for the local rank 0.

    Shards of later batches fill at most half of the cache, and none is fetched more than an epoch ahead. A failed fetch
    is logged and left to the readers, which use the cache too. The process ends with the block, and with its parent
    even if that is killed.

    Args:
        cache: the node's cache.
        requests: returns the requests of the node's ranks from the first batch on; can be pickled.
        shards: those of the manifest; those that the cache does not serve are skipped.
        begin, end: numbers of the first batch and the one after the last.
        ahead: batches that shards are fetched ahead of at most, those of an epoch.

    Example:
        requests = partial(order.shards_ahead, 0, 0, [slice(0, 512)])
        with Prefetcher(cache, requests, shards, begin=0, end=1000, ahead=order.steps_per_epoch) as prefetcher:
            for number, batch in enumerate(batches):
                prefetcher.advance(number)
    """

    def __init__(
        self,
        cache: ShardCache,
        requests: Callable[[], Iterator[ShardRequest]],
        shards: Sequence[Shard],
        *,
        begin: int,
        end: int,
        ahead: int,
    ) -> None:
        context = multiprocessing.get_context("spawn")  # this process has threads, which break under fork
        # No lock: its holder may be killed, and a 64-bit write is atomic.
        self._reached = context.RawValue(c_longlong, begin)
        arguments = (cache, requests, shards, end, ahead, self._reached, os.getpid())
        self._process = context.Process(target=_run, args=arguments, name="prefetch", daemon=True)
        self._warned = False

    def __enter__(self) -> Prefetcher:
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # the cache is consistent at any time
        self._process.join()

    def advance(self, number: int) -> None:
        """Report that training has reached a batch; does not block."""
        self._reached.value = number
        if self._process.exitcode is not None and not self._warned:
            self._warned = True
            log.warning(
                "the prefetching process has ended (code %d): shards are now fetched only when they are read",
                self._process.exitcode,
            )


def _run(
    cache: ShardCache,
    requests: Callable[[], Iterator[ShardRequest]],
    shards: Sequence[Shard],
    end: int,
    ahead: int,
    reached: c_longlong,
    parent: int,
) -> NoReturn:
    """Run the prefetching process."""
    end_with_parent(parent)
    window = _Window(cache, shards, requests())
    while True:
        window.move(reached.value, min(reached.value + ahead, end))
        time.sleep(_POLL)


class _Window:
    """Fetch the shards of a `RequestWindow` into the cache."""

    def __init__(self, cache: ShardCache, shards: Sequence[Shard], requests: Iterator[ShardRequest]) -> None:
        self._cache, self._shards = cache, shards
        sizes = [shard.bytes if cache.serves(shard.path) else 0 for shard in shards]
        self._requests = RequestWindow(requests, sizes, cache.capacity_bytes)
        self._reached = 0
        self._pool = ThreadPoolExecutor(cache.storage.transfers)
        self._warned = False

    def move(self, reached: int, end: int) -> None:
        """Drop the requests before `reached`; of those before `end`, fetch as many as fit into the cache."""
        self._reached = reached
        before = self._requests.shards
        if admitted := self._requests.move(reached, end):
            for shard in before:  # counts as a use, so that the new ones do not evict them
                self._is_cached(self._shards[shard])
            for request in admitted:
                self._pool.submit(self._fetch, request)
        if self._requests.is_too_small and not self._warned:
            self._warned = True
            log.warning(
                "data.cache_gb=%g is too small for the shards that one batch reads (more than %.2f GB), which are "
                "therefore fetched repeatedly: raise data.cache_gb",
                *(self._cache.capacity_bytes / 1e9, self._requests.in_use / 1e9),
            )

    def _is_cached(self, shard: Shard) -> bool:
        """Whether a shard needs no fetch; counts as a use."""
        return not self._cache.serves(shard.path) or self._cache.touch(shard.path, shard.bytes)

    def _fetch(self, request: ShardRequest) -> None:
        """Fetch a shard, in a thread of the pool."""
        shard = self._shards[request.shard]
        if request.last < self._reached or self._is_cached(shard):
            return
        try:
            self._cache.path(shard.path, shard.bytes, shard.crc32, due=False)
        except (OSError, UserError) as error:
            log.warning("cannot prefetch a shard: %s", error)
