"""Which shards the coming batches read, merged over streams in order of first use."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol


class ShardRequest(NamedTuple):
    """A shard from which rows of the batches `first` ... `last` are read; batches are counted across epochs."""

    first: int
    last: int
    shard: int


class StreamBlocks(Protocol):
    """The blocks of a shard stream that training passes, one after the other."""

    begins: int | None  # batch that the block which is due begins in, None after the last block

    def take(self) -> Iterable[ShardRequest]:
        """Return the requests of the block that is due, none before `begins`, and move to the next one."""


def by_first_use(streams: Sequence[StreamBlocks]) -> Iterator[ShardRequest]:
    """Iterate over the requests of all streams in order of their first use, computing no block before its time."""
    due = [(stream.begins, at) for at, stream in enumerate(streams) if stream.begins is not None]
    heapify(due)
    found: list[ShardRequest] = []
    while due:
        begins, at = heappop(due)
        while found and found[0].first <= begins:
            yield heappop(found)
        for request in streams[at].take():
            heappush(found, request)
        if (following := streams[at].begins) is not None:
            heappush(due, (following, at))
    yield from sorted(found)
