"""Fetches the shards that a node will read into its cache before they are needed, in one process a node.

The order of samples is known for ever ahead (neuclip_ds/data/order.py), so the process walks it by itself and is told
nothing but the step that training has reached.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_longlong
from typing import NamedTuple

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.order import GlobalOrder, ShardRequest
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError

logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds between looks at the step
_AHEAD = 0.5  # share of the cache for what is not needed yet


class StoredShard(NamedTuple):
    """Where a shard is, and its size."""

    url: str
    bytes: int


class Prefetcher:
    """A process that keeps the cache ahead of training; for the local rank 0.

    Shards whose time has not come fill at most half of the cache, and none is fetched more than an epoch ahead. What
    cannot be fetched is logged and left to the readers, who ask the cache themselves. The process ends with the block,
    and with its parent even if that is killed.

    Example:
        with Prefetcher(cache, order, shards, epoch=0, step=0, rows=slice(0, 512), total_steps=1000) as prefetcher:
            for number, batch in enumerate(batches):
                prefetcher.advance(number)
    """

    def __init__(
        self,
        cache: ShardCache,
        order: GlobalOrder,
        shards: Sequence[StoredShard],
        *,
        epoch: int,
        step: int,
        rows: slice,
        total_steps: int,
        transfers: int = 4,
    ) -> None:
        """
        Args:
            cache: the node's.
            order: of the training batches.
            shards: (n_shards,) in the manifest's order; local ones are passed over.
            epoch, step: where training begins.
            rows: the node's part of the global batch, with start and stop.
            total_steps: steps since step 0 of epoch 0 after which training ends.
            transfers: shards that are fetched at a time.
        """
        context = multiprocessing.get_context("spawn")  # this process has threads, which a fork would cut off
        # Without a lock: its holder may be killed, and a word is written at once.
        self._reached = context.RawValue(c_longlong, epoch * order.steps_per_epoch + step)
        arguments = (
            cache,
            order,
            list(shards),
            (epoch, step, rows),
            total_steps,
            transfers,
            self._reached,
            os.getpid(),
        )
        self._process = context.Process(target=_run, args=arguments, name="prefetch", daemon=True)
        self._missed = False

    def __enter__(self) -> Prefetcher:
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # the cache is whole at any time
        self._process.join()

    def advance(self, number: int) -> None:
        """Tell that training has come to a batch, counted since step 0 of epoch 0; returns at once."""
        self._reached.value = number
        if self._process.exitcode is not None and not self._missed:
            self._missed = True
            logger.warning(
                "the prefetching process has ended (code %d): shards are fetched only when they are needed",
                self._process.exitcode,
            )


def _run(
    cache: ShardCache,
    order: GlobalOrder,
    shards: list[StoredShard],
    start: tuple[int, int, slice],
    total_steps: int,
    transfers: int,
    reached: c_longlong,
    parent: int,
) -> None:
    """The process. SIGTERM, which launchers send to the whole tree, ends it; the readers go on without it."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    window = _Window(cache, shards, order.shards_ahead(*start), transfers)
    while os.getppid() == parent:
        window.move(reached.value, min(reached.value + order.steps_per_epoch, total_steps))
        time.sleep(_POLL)
    os._exit(1)  # without waiting for the transfers


class _Window:
    """The needs from the batch reached up to where the cache is full."""

    def __init__(
        self, cache: ShardCache, shards: Sequence[StoredShard], needs: Iterator[ShardRequest], transfers: int
    ) -> None:
        self._cache, self._shards, self._needs = cache, shards, needs
        self._next = next(needs, None)
        self._inside: deque[ShardRequest] = deque()
        self._reached = 0
        self._pool = ThreadPoolExecutor(transfers)
        self._warned = False

    def move(self, reached: int, end: int) -> None:
        """Drop what lies behind `reached` and order what fits into the cache of the needs before `end`."""
        self._reached = reached
        while self._inside and self._inside[0].last < reached:
            self._inside.popleft()
        if ordered := self._take(reached, end):
            for need in self._inside:  # they are not to make room for the new ones
                self._present(self._shards[need.shard])
            self._inside.extend(ordered)
            for need in ordered:
                self._pool.submit(self._fetch, need)

    def _take(self, reached: int, end: int) -> list[ShardRequest]:
        """The next needs, as many as the cache holds with those that are inside."""
        now = {need.shard for need in self._inside if need.first <= reached}
        held = now | {need.shard for need in self._inside}
        in_use = sum(self._shards[shard].bytes for shard in now)
        to_come = sum(self._shards[shard].bytes for shard in held - now)
        taken: list[ShardRequest] = []
        while self._next is not None and self._next.last < reached:  # what never fitted is over
            self._next = next(self._needs, None)
        while (need := self._next) is not None and need.first < end:
            more = 0 if need.shard in held else self._shards[need.shard].bytes
            is_due = need.first <= reached
            in_use, to_come = in_use + more * is_due, to_come + more * (not is_due)
            if in_use + to_come > self._cache.capacity_bytes or to_come > _AHEAD * self._cache.capacity_bytes:
                if is_due:
                    self._warn(in_use)
                break
            held.add(need.shard)
            taken.append(need)
            self._next = next(self._needs, None)
        return taken

    def _warn(self, in_use: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "data.cache_gb=%g does not hold the shards that one batch is mixed from (more than %.2f GB), which are "
                "therefore fetched again and again: raise it, or lower data.shuffle_block",
                *(self._cache.capacity_bytes / 1e9, in_use / 1e9),
            )

    def _present(self, shard: StoredShard) -> bool:
        return is_local(shard.url) or self._cache.touch(shard.url, shard.bytes)

    def _fetch(self, need: ShardRequest) -> None:
        """In a thread of the pool."""
        shard = self._shards[need.shard]
        if need.last < self._reached or self._present(shard):
            return
        try:
            self._cache.path(shard.url, shard.bytes)
        except (OSError, UserError) as error:
            logger.warning("not fetched ahead: %s", error)
