"""Fetch the samples of the first batches before the rest of their shards, so that training begins sooner.

Otherwise, the first batch would wait for a whole shard of every stream. Each shard that the next batches read is
fetched in pieces: first the ranges of bytes with their samples, then everything else. Pieces do not overlap, so no byte
is fetched twice, unless a piece fails or the shard's checksum differs: the whole shard is then fetched instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from neuclip_ds.data.cache import ShardCache
from neuclip_ds.data.manifest import Shard
from neuclip_ds.data.partial_shard import PartialShard, Range
from neuclip_ds.data.range_reader import RangeReader, RemoteFile, server_of
from neuclip_ds.data.readers import TarReader
from neuclip_ds.data.shards import is_local
from neuclip_ds.errors import UserError

log = logging.getLogger(__name__)

# samples are fetched in several small groups, so that the first of them can be decoded early
_THREADS = 4
_PIECES_AT_ONCE = 16  # simultaneous requests of each thread
_REST_PIECES = 4  # simultaneous requests for the rest of one shard
_REST_BYTES = 4 << 20  # maximum bytes of one request for the rest of a shard
_POLL = 0.01  # seconds


class _Claim(NamedTuple):
    """A claimed piece of a shard, and the number of the shard."""

    number: int
    shard: PartialShard
    piece: Range


class EarlySamples:
    """The shards that the prefetching process fetches in pieces.

    If a piece cannot be fetched, the shard is abandoned and then fetched as a whole; a persistent error is reported by
    that second fetch.

    Args:
        cache: the node's cache.
        reader: a reader of the manifest that lists `shards`; the manifest must have sample tables.
        shards: all shards of the manifest.
        samples_of_batch: a function of a batch's number that returns the indices of the samples that this node reads.
    """

    def __init__(
        self,
        cache: ShardCache,
        reader: TarReader,
        shards: Sequence[Shard],
        samples_of_batch: Callable[[int], Iterable[int]],
    ) -> None:
        self._cache = cache
        self._reader = reader
        self._shards = shards
        self._samples_of_batch = samples_of_batch
        self._ranges = RangeReader(cache.timeout)
        self._begun: dict[int, PartialShard] = {}  # by the number of the shard
        self._mutex = threading.Lock()  # held while a shard leaves `_begun`
        self._requested_end = 0  # number of the first batch whose samples have not been requested
        self._pool = ThreadPoolExecutor(_THREADS)

    def begin(self, numbers: Iterable[int]) -> None:
        """Begin to fetch the given shards in pieces, except shards that are cached or cannot be fetched in pieces."""
        for number in numbers:
            shard = self._shards[number]
            if number in self._begun or is_local(shard.path) or not self._ranges.supports(shard.path):
                continue
            try:
                partial_shard = self._cache.begin(shard.path, shard.bytes)
            except OSError:  # fetching the whole shard reports it
                continue
            if partial_shard is not None:
                self._begun[number] = partial_shard

    def fetch_batches(self, first: int, end: int, in_turn: bool = False) -> None:
        """Start to fetch the samples of batches `first` ... `end` - 1 that are in begun shards.

        Batches for which this method has been called before are skipped. If `in_turn`, wait for the samples of each
        batch before requesting anything else, so that they get the whole bandwidth.
        """
        for number in range(max(first, self._requested_end), end):
            claims_of_servers: dict[str, list[_Claim]] = defaultdict(list)
            for claim in self._claim_batch(number):
                claims_of_servers[server_of(claim.shard.url)].append(claim)
            requests = []
            for claims in claims_of_servers.values():
                for start in range(0, len(claims), _PIECES_AT_ONCE):
                    requests.append(self._pool.submit(self._fetch, claims[start : start + _PIECES_AT_ONCE]))
            if in_turn:
                wait(requests)
        self._requested_end = max(self._requested_end, end)

    def _claim_batch(self, number: int) -> Iterator[_Claim]:
        """Claim the samples of a batch that are in begun shards, unless they have been claimed before."""
        for index in self._samples_of_batch(number):
            try:
                sample = self._reader.byte_range(index)
            except UserError:  # the loader process that reads the sample reports it
                continue
            if sample is None:
                continue
            shard = self._begun.get(sample.shard)
            if shard is not None:
                for piece in shard.claim(sample.start, sample.end):
                    yield _Claim(sample.shard, shard, piece)

    def fetch_rest(self, number: int) -> bool:
        """Fetch the unclaimed bytes of a begun shard, wait for the claimed ones, and move the shard into the cache.

        Returns whether this call moved the shard: False if the shard was not begun, if a piece failed, if the checksum
        differs, or if another thread moves the shard.
        """
        shard = self._begun.get(number)
        while shard is not None and not shard.is_complete:
            pieces = shard.claim_next(_REST_PIECES, _REST_BYTES)
            if pieces:
                self._fetch([_Claim(number, shard, piece) for piece in pieces])
            else:  # all bytes are claimed, but other threads have not received theirs yet
                time.sleep(_POLL)
            shard = self._begun.get(number)  # None if a piece could not be fetched
        # another thread may have fetched the same shard for a later request
        if shard is None or not self._take(number, shard):
            return False
        return self._cache.complete(shard, self._shards[number].crc32)

    def drop(self, number: int) -> None:
        """Abandon a begun shard that is no longer needed; otherwise, it would keep its space in the cache."""
        shard = self._begun.get(number)
        if shard is not None and self._take(number, shard):
            self._cache.abandon(shard)

    def _fetch(self, claims: Sequence[_Claim]) -> None:
        """Fetch claimed pieces of shards on one server; abandon a shard if one of its pieces cannot be fetched."""
        claims = [claim for claim in claims if self._begun.get(claim.number) is claim.shard]
        if not claims:
            return
        files = [RemoteFile(url=claim.shard.url, size=claim.shard.size) for claim in claims]
        try:
            results = self._ranges.read(files, [claim.piece for claim in claims])
        except Exception as error:  # backends raise many types
            results = [error] * len(claims)
        for claim, result in zip(claims, results, strict=True):
            start, _ = claim.piece
            try:
                if isinstance(result, BaseException):
                    raise result
                claim.shard.write(start, result)
            except Exception as error:
                self._abandon(claim, error)

    def _abandon(self, claim: _Claim, error: Exception) -> None:
        if self._take(claim.number, claim.shard):  # only after the first failure of the shard
            log.debug("fetching shard %s as a whole, because a piece of it failed: %r", claim.shard.url, error)
            self._cache.abandon(claim.shard)

    def _take(self, number: int, shard: PartialShard) -> bool:
        """Remove a shard from the begun shards, so that only one thread completes or abandons it.

        Returns whether the shard was among them. A shard with the same number that was begun later is not removed.
        """
        with self._mutex:
            is_begun = self._begun.get(number) is shard
            if is_begun:
                del self._begun[number]
        return is_begun
