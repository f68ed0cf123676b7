"""Decide which shards a node's cache fetches ahead: in order of first use, as far as they fit."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from neuclip_ds.data.shard_requests import ShardRequest

_AHEAD = 0.5  # share of the cache for shards of later batches


class RequestWindow:
    """The shard requests from the batch reached up to where the cache is full.

    Args:
        requests: in order of their first use.
        sizes: bytes of each shard.
        capacity: bytes of the cache. Shards of later batches fill at most half of it.

    Attributes:
        in_use: bytes of the shards that the batch reached may read.
        ahead: bytes of those of later batches only.
        is_too_small: whether what the batch reached needs has ever been more than the cache holds.
    """

    def __init__(self, requests: Iterator[ShardRequest], sizes: Sequence[int], capacity: int) -> None:
        self._requests, self._sizes, self._capacity = requests, sizes, capacity
        self._next = next(requests, None)
        self._waiting: deque[ShardRequest] = deque()  # admitted, of later batches
        self._due: list[tuple[int, int]] = []  # heap of (last, shard) of the others
        self._users, self._due_users = Counter[int](), Counter[int]()  # admitted requests of each shard
        self.in_use = self.ahead = 0
        self.is_too_small = False

    @property
    def shards(self) -> list[int]:
        """The admitted shards."""
        return list(self._users)

    def move(self, reached: int, end: int) -> list[ShardRequest]:
        """Drop the requests before the batch `reached`; admit and return those before `end`, as many as fit."""
        while self._waiting and self._waiting[0].first <= reached:
            self._begin(self._waiting.popleft())
        while self._due and self._due[0][0] < reached:
            self._drop(heappop(self._due)[1])
        while self._next is not None and self._next.last < reached:  # skip what never fitted
            self._next = next(self._requests, None)
        admitted: list[ShardRequest] = []
        while (request := self._next) is not None and request.first < end and self._fits(request, reached):
            self._add(request, reached)
            admitted.append(request)
            self._next = next(self._requests, None)
        return admitted

    def _fits(self, request: ShardRequest, reached: int) -> bool:
        more, is_due = self._sizes[request.shard], request.first <= reached
        if self._users[request.shard]:
            more = 0
        if self.in_use + self.ahead + more > self._capacity:
            self.is_too_small |= is_due
            return False
        return is_due or self.ahead + more <= _AHEAD * self._capacity

    def _add(self, request: ShardRequest, reached: int) -> None:
        if not self._users[request.shard]:
            self.ahead += self._sizes[request.shard]
        self._users[request.shard] += 1
        if request.first <= reached:
            self._begin(request)
        else:
            self._waiting.append(request)

    def _begin(self, request: ShardRequest) -> None:
        if not self._due_users[request.shard]:
            self.ahead -= self._sizes[request.shard]
            self.in_use += self._sizes[request.shard]
        self._due_users[request.shard] += 1
        heappush(self._due, (request.last, request.shard))

    def _drop(self, shard: int) -> None:
        for users in (self._users, self._due_users):
            users[shard] -= 1
        if not self._due_users[shard]:
            self.in_use -= self._sizes[shard]
            self.ahead += self._sizes[shard] * (self._users[shard] > 0)
            del self._due_users[shard]
        if not self._users[shard]:
            del self._users[shard]
