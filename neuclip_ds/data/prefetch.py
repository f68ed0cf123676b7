"""Fill a node's cache with the shards and stored features that its ranks will read next, in one process per node.

The sample order is a pure function (neuclip_ds/data/order.py), so the process needs to know only the step that training
has reached.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_longlong
from functools import partial
from heapq import merge
from multiprocessing import Pipe
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import RawValue
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.data.decoders import Captions, CaptionSources
from neuclip_ds.data.early_samples import EarlySamples
from neuclip_ds.data.feature_table import FeatureTable
from neuclip_ds.data.interleave import FULL
from neuclip_ds.data.manifest import Manifest, Shard
from neuclip_ds.data.mixture import BatchOrder, MixtureOrder
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

_POLL = 0.1  # seconds between reads of the step
_EARLY_BATCHES = 2  # number of batches whose samples are fetched before the rest of their shards
_LONGEST_BEGIN = 10.0  # maximum seconds that a run waits until the process has begun the first shards


class ShardRequest(NamedTuple):
    """A shard that batches `first` ... `last` may read; batch numbers continue across epochs."""

    first: int
    last: int
    shard: int


def shards_ahead(order: BatchOrder, epoch: int, step: int, rows: Sequence[slice]) -> Iterator[ShardRequest]:
    """Endlessly yield requests for the shards that contain the given rows of each batch, starting at `step` of `epoch`.

    For each stream that contains any of the rows, all shards of a block are requested once, for the first batch that
    reads the block. If only part of a block is read, some of these shards might not be needed. Sources that have no
    rows in a mixture's batches are skipped. `step` may be steps_per_epoch, which means the start of the next epoch.
    """
    first_batch = epoch * order.steps_per_epoch + step
    rows_per_stream = order.batch_size // order.interleave.streams
    streams_of_rows = [np.arange(order.batch_size)[part] // rows_per_stream for part in rows]
    streams = np.unique(np.concatenate(streams_of_rows)).tolist()
    requests = []
    if isinstance(order, MixtureOrder):
        for source in range(len(order.sources)):
            requests += [_requests_of_source(order, source, stream, first_batch) for stream in streams]
    else:
        requests += [_requests_of_stream(order, stream, first_batch, rows_per_stream) for stream in streams]
    return merge(*requests, key=attrgetter("first"))


def _requests_of_stream(
    order: GlobalOrder, stream: int, first_batch: int, rows_per_stream: int
) -> Iterator[ShardRequest]:
    """Yield the requests for a stream, starting at batch `first_batch`."""
    positions_per_epoch = order.steps_per_epoch * rows_per_stream  # `drop_last` omits positions
    length = min(int(order.stream_lengths[stream]), positions_per_epoch)
    if not length:
        return
    epoch, step = divmod(first_batch, order.steps_per_epoch)
    position = step * rows_per_stream
    while True:
        batches_before = epoch * order.steps_per_epoch
        while position < length:
            start, end = order.block_bounds(stream, position)
            first = batches_before + position // rows_per_stream
            last = batches_before + (min(end, length) - 1) // rows_per_stream
            for shard in order.shards_between(epoch, stream, start, end):
                yield ShardRequest(first, last, shard)
            position = end
        epoch += 1
        position = 0


def _requests_of_source(mixture: MixtureOrder, source: int, stream: int, first_batch: int) -> Iterator[ShardRequest]:
    """Yield the requests for one stream of one source in a mixture, starting at batch `first_batch`."""
    order = mixture.sources[source]
    length = int(order.stream_lengths[stream])
    samples_per_cycle = mixture.taken(source, stream, mixture.interleave.streams)  # 0 if the source has no rows
    if not length or not samples_per_cycle:
        return
    position = mixture.taken(source, stream, first_batch)
    while True:
        first = mixture.step_of(source, stream, position)
        epoch, within = divmod(position, length)
        start, end = order.block_bounds(stream, within)
        position = epoch * length + end
        last = mixture.step_of(source, stream, position - 1)
        for shard in order.shards_between(epoch, stream, start, end):
            yield ShardRequest(max(first, first_batch), last, shard)


class RequestWindow:
    """The shard requests from the current batch up to the batch at which the cache would be full.

    `requests` are in order of first use. `shards` are the admitted shards, and `bytes` is their total size. Shards for
    later batches fill at most 90% of `capacity`. `is_too_small` is true once a batch has needed more than `capacity`.
    """

    def __init__(self, requests: Iterator[ShardRequest], sizes: Sequence[int], capacity: int) -> None:
        self._requests = requests
        self._sizes = sizes
        self._capacity = capacity
        self._next = next(requests, None)
        self._admitted: list[ShardRequest] = []
        self.shards: set[int] = set()
        self.bytes = 0
        self.is_too_small = False

    def move(self, reached: int, end: int) -> list[ShardRequest]:
        """Drop requests with last < reached; admit and return more requests with first < end that fit in the cache."""
        self._admitted = [request for request in self._admitted if request.last >= reached]
        self.shards = {request.shard for request in self._admitted}
        self.bytes = sum(self._sizes[shard] for shard in self.shards)
        kept = len(self._admitted)
        while (request := self._next) is not None and request.first < end:
            if request.last >= reached:  # otherwise, training passed the request before it fit in the cache
                is_due = request.first <= reached
                total = self.bytes
                if request.shard not in self.shards:
                    total += self._sizes[request.shard]
                if total > self._capacity * (1 if is_due else FULL):
                    self.is_too_small |= is_due
                    break
                self._admitted.append(request)
                self.shards.add(request.shard)
                self.bytes = total
            self._next = next(self._requests, None)
        return self._admitted[kept:]


def early_samples(
    cache: ShardCache, manifest: Manifest, captions: CaptionSources, order: BatchOrder, rows: Sequence[slice]
) -> EarlySamples | None:
    """Return the `EarlySamples` of a `Prefetcher` for the given rows; None if the manifest has no sample tables."""
    if manifest.samples is None:
        return None
    reader = TarReader(manifest, Captions(captions).extensions, cache)
    return EarlySamples(cache, reader, manifest.shards, partial(_samples_of_batch, order, rows))


def _samples_of_batch(order: BatchOrder, rows: Sequence[slice], number: int) -> list[int]:
    """Return the indices of the samples in the given rows of a batch, whose number continues across epochs."""
    epoch, step = divmod(number, order.steps_per_epoch)
    indices = np.concatenate([order.batch(epoch, step, part) for part in rows])
    return [index for index in indices.tolist() if index >= 0]


class Prefetcher(ForkProcess):
    """A process that fetches shards ahead of training, in order of first use; the first rank of each node starts it.

    A failed fetch is logged, and the readers then retry it through the same cache. The process ends when the `with`
    block or the parent ends, even if the parent is killed. It is forked, as the loader processes are, so that it begins
    at once and does not import modules again.

    `requests` is a function that returns the requests of the node's ranks, starting at batch `begin`. Remote shards are
    fetched at most `ahead` batches ahead, and only for batches before `end`; local shards are skipped. A shard's stored
    features in the remote `tables` are fetched before it, because all of its samples need the same file; if
    `reads_shards` is false, only the features are fetched. If `early_samples` is given, shards that are requested less
    than two batches before their first use, as at the start, are fetched in pieces, beginning with the samples of these
    batches. Enter the `with` block before the readers start: a reader that finds neither a shard nor its first pieces
    fetches the whole shard itself.
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
        early_samples: EarlySamples | None = None,
        tables: Iterable[FeatureTable] = (),
        reads_shards: bool = True,
    ) -> None:
        super().__init__(name="prefetch", daemon=True)
        self._cache = cache
        self._requests = requests
        self._shards = shards
        self._end = end
        self._ahead = ahead
        self._early_samples = early_samples
        self._reads_shards = reads_shards
        self._tables = {table.folder: table for table in tables if not is_local(table.folder)}
        # without a lock: the process that holds it might be killed, and a 64-bit write is atomic
        self._reached = RawValue(c_longlong, begin)
        self._starter = os.getpid()
        self._has_reported_end = False  # in the process that starts this one

    def __enter__(self) -> Prefetcher:
        receiver, self._has_begun = Pipe(duplex=False)
        self.start()
        self._has_begun.close()  # only the prefetching process keeps this end open
        receiver.poll(_LONGEST_BEGIN)  # returns early if the process has ended
        receiver.close()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()  # the cache is consistent at any time
        self.join()

    def advance(self, number: int) -> None:
        """Report, without blocking, that training has reached batch `number`."""
        self._reached.value = number
        if self.exitcode is not None and not self._has_reported_end:
            self._has_reported_end = True
            log.warning(
                "the prefetching process has ended, so remote files are now fetched only when they are read, and "
                "training may be slower"
            )

    def run(self) -> None:
        """Fetch shards until the process is killed."""
        end_with_parent(self._starter)
        gc.freeze()  # garbage collections would copy the memory that is shared with the parent
        sizes = [shard.bytes if self._fetches(shard) else 0 for shard in self._shards]
        for table in self._tables.values():
            sizes = [size + int(added) for size, added in zip(sizes, table.cached_bytes, strict=True)]
        window = RequestWindow(self._requests(), sizes, self._cache.capacity_bytes)
        pool = ThreadPoolExecutor(self._cache.downloads)

        # the first requests; the run waits until the shards that it needs first have begun to be fetched in pieces
        reached = self._reached.value
        admitted = self._admit(window, reached)
        self._has_begun.send(True)
        self._fetch_all(admitted, reached, pool, in_turn=True)

        # further requests as training advances
        has_warned = False
        while True:
            if window.is_too_small and not has_warned:
                has_warned = True
                log.warning(
                    "batches need more remote files than fit in the cache, so files are fetched repeatedly: raise "
                    "data.cache_gb (now %g)",
                    self._cache.capacity_bytes / 1e9,
                )
            time.sleep(_POLL)
            reached = self._reached.value
            admitted = self._admit(window, reached)
            self._fetch_all(admitted, reached, pool)

    def _admit(self, window: RequestWindow, reached: int) -> list[ShardRequest]:
        """Move the window to batch `reached`, and return the new requests; their files may already be cached.

        Marks the shards in the window as used, and begins to fetch new shards that are needed soon in pieces.
        """
        admitted = window.move(reached, min(reached + self._ahead, self._end))
        if admitted:
            for number in window.shards:  # so that new shards evict only others
                self._cache.touch(self._shards[number].path, self._shards[number].bytes)
                for table in self._tables.values():
                    self._cache.touch(table.file_of(number), int(table.cached_bytes[number]))
        if self._early_samples is not None:
            early_end = self._early_end(reached)
            self._early_samples.begin({request.shard for request in admitted if request.first < early_end})
        return admitted

    def _fetch_all(
        self, admitted: Sequence[ShardRequest], reached: int, pool: ThreadPoolExecutor, in_turn: bool = False
    ) -> None:
        """Start to fetch the first samples that training needs from batch `reached` on, then the admitted requests.

        If `in_turn`, the first samples arrive before anything else is requested, so that they get the whole bandwidth.
        """
        if self._early_samples is not None:
            self._early_samples.fetch_batches(reached, self._early_end(reached), in_turn)
        for request in admitted:
            pool.submit(self._fetch, request)

    def _early_end(self, reached: int) -> int:
        """Return the end of the batches whose samples are fetched before the rest of their shards."""
        return min(reached + _EARLY_BATCHES, self._end)

    def _fetches(self, shard: Shard) -> bool:
        return self._reads_shards and not is_local(shard.path)

    def _fetch(self, request: ShardRequest) -> None:
        shard = self._shards[request.shard]
        if request.last < self._reached.value:  # training has overtaken the download
            if self._early_samples is not None:
                self._early_samples.drop(request.shard)
            return
        try:
            for table in self._tables.values():
                self._cache.path(table.file_of(request.shard), int(table.cached_bytes[request.shard]))
            if not self._fetches(shard):
                return
            if self._early_samples is None or not self._early_samples.fetch_rest(request.shard):
                self._cache.path(shard.path, shard.bytes, shard.crc32)
        except (OSError, UserError) as error:
            log.warning("a file could not be prefetched; the loader tries again when it reads the file. %s", error)
