"""Prefetch the shards that a node will read into its cache, in one process per node.

The order of samples is a pure function (neuclip_ds/data/order.py), so the process only needs the step that training has
reached.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_longlong
from typing import NoReturn

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.order import GlobalOrder, ShardRequest
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

_POLL = 0.1  # seconds between reads of the step
_AHEAD = 0.5  # share of the cache for shards of later batches


class Prefetcher:
    """A process that fetches shards ahead of training; for the local rank 0.

    Shards of later batches fill at most half of the cache, and none is fetched more than an epoch ahead. A failed fetch
    is logged and left to the readers, which use the cache too. The process ends with the block, and with its parent
    even if that is killed.

    Args:
        cache: the node's cache.
        order: order of the training batches.
        shards: those of the manifest; local ones are skipped.
        epoch, step: where training starts.
        rows: the node's rows of the global batch, those of its ranks.
        total_steps: step at which training ends, counted since step 0 of epoch 0.

    Example:
        with Prefetcher(cache, order, shards, epoch=0, step=0, rows=[slice(0, 512)], total_steps=1000) as prefetcher:
            for number, batch in enumerate(batches):
                prefetcher.advance(number)
    """

    def __init__(
        self,
        cache: ShardCache,
        order: GlobalOrder,
        shards: Sequence[Shard],
        *,
        epoch: int,
        step: int,
        rows: Sequence[slice],
        total_steps: int,
    ) -> None:
        context = multiprocessing.get_context("spawn")  # this process has threads, which break under fork
        # No lock: its holder may be killed, and a 64-bit write is atomic.
        self._reached = context.RawValue(c_longlong, epoch * order.steps_per_epoch + step)
        arguments = (cache, order, shards, (epoch, step, rows), total_steps, self._reached, os.getpid())
        self._process = context.Process(target=_run, args=arguments, name="prefetch", daemon=True)
        self._warned = False

    def __enter__(self) -> Prefetcher:
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # the cache is consistent at any time
        self._process.join()

    def advance(self, number: int) -> None:
        """Report that training has reached a batch, counted since step 0 of epoch 0; does not block."""
        self._reached.value = number
        if self._process.exitcode is not None and not self._warned:
            self._warned = True
            log.warning(
                "the prefetching process has ended (code %d): shards are now fetched only when they are read",
                self._process.exitcode,
            )


def _run(
    cache: ShardCache,
    order: GlobalOrder,
    shards: Sequence[Shard],
    start: tuple[int, int, Sequence[slice]],
    total_steps: int,
    reached: c_longlong,
    parent: int,
) -> NoReturn:
    """Run the prefetching process."""
    end_with_parent(parent)
    window = _Window(cache, shards, order.shards_ahead(*start))
    while True:
        window.move(reached.value, min(reached.value + order.steps_per_epoch, total_steps))
        time.sleep(_POLL)


class _Window:
    """The shard requests from the batch reached up to where the cache is full."""

    def __init__(self, cache: ShardCache, shards: Sequence[Shard], requests: Iterator[ShardRequest]) -> None:
        self._cache, self._shards, self._requests = cache, shards, requests
        self._next = next(requests, None)
        self._inside: deque[ShardRequest] = deque()
        self._reached = 0
        self._pool = ThreadPoolExecutor(cache.transfers)
        self._warned = False

    def move(self, reached: int, end: int) -> None:
        """Drop the requests before `reached`; of those before `end`, fetch as many as fit into the cache."""
        self._reached = reached
        while self._inside and self._inside[0].last < reached:
            self._inside.popleft()
        if admitted := self._take(reached, end):
            for request in self._inside:  # counts as a use, so that the new ones do not evict them
                self._is_cached(self._shards[request.shard])
            self._inside.extend(admitted)
            for request in admitted:
                self._pool.submit(self._fetch, request)

    def _take(self, reached: int, end: int) -> list[ShardRequest]:
        """Return the next requests, as many as the cache holds together with the admitted ones."""
        now = {request.shard for request in self._inside if request.first <= reached}
        known = now | {request.shard for request in self._inside}
        in_use = sum(self._shards[shard].bytes for shard in now)
        ahead = sum(self._shards[shard].bytes for shard in known - now)
        taken: list[ShardRequest] = []
        while self._next is not None and self._next.last < reached:  # skip what never fitted
            self._next = next(self._requests, None)
        while (request := self._next) is not None and request.first < end:
            more = 0 if request.shard in known else self._shards[request.shard].bytes
            is_due = request.first <= reached
            in_use, ahead = in_use + more * is_due, ahead + more * (not is_due)
            if in_use + ahead > self._cache.capacity_bytes or ahead > _AHEAD * self._cache.capacity_bytes:
                if is_due:
                    self._warn(in_use)
                break
            known.add(request.shard)
            taken.append(request)
            self._next = next(self._requests, None)
        return taken

    def _warn(self, in_use: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "data.cache_gb=%g is too small for the shards that one batch reads (more than %.2f GB), which are "
                "therefore fetched repeatedly: raise data.cache_gb, or lower data.shuffle_block",
                *(self._cache.capacity_bytes / 1e9, in_use / 1e9),
            )

    def _is_cached(self, shard: Shard) -> bool:
        """Whether a shard needs no fetch; counts as a use."""
        return is_local(shard.path) or self._cache.touch(shard.path, shard.bytes)

    def _fetch(self, request: ShardRequest) -> None:
        """Fetch a shard, in a thread of the pool."""
        shard = self._shards[request.shard]
        if request.last < self._reached or self._is_cached(shard):
            return
        try:
            self._cache.path(shard.path, shard.bytes, shard.crc32, due=False)
        except (OSError, UserError) as error:
            log.warning("cannot prefetch a shard: %s", error)
