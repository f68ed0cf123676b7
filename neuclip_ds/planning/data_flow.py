"""Simulate what a node fetches, keeps and waits for, with the order of samples and cache policy of a real run.

Shards arrive one after the other at the node's bandwidth; the cache evicts those used least recently.
"""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.data.interleave import DataSize
from neuclip_ds.data.order import BatchOrder
from neuclip_ds.data.request_window import RequestWindow
from neuclip_ds.data.shard_requests import ShardRequest

BANDWIDTH = 1.25e9  # bytes per second that a node fetches, as 10 Gbit/s give; assumed
RATE = 10_000  # samples per second that a node trains on; assumed


class Node(NamedTuple):
    """What a node has for the data."""

    cache: float  # bytes
    bandwidth: float  # bytes per second
    step_seconds: float  # of a training step that does not wait


class DataFlow(NamedTuple):
    """What a node does in a simulated part of a run."""

    resident: float  # bytes of the shards in use and fetched ahead, at most
    first: float  # bytes of the shards that the first batch needs
    first_seconds: float  # until they are there
    amplification: float  # bytes fetched for each byte used
    requests_per_second: float  # shards
    stalled: float  # share of the time after the first batch in which training waits
    is_estimate: bool = False

    def lines(self) -> list[str]:
        """Return the report."""
        estimated = " (estimated: the cache is too small for a batch)" if self.is_estimate else ""
        return [
            f"  resident       {self.resident / 1e9:,.1f} GB of shards at most, with those fetched ahead{estimated}",
            f"  first batch    {self.first / 1e9:,.1f} GB, {self.first_seconds:,.0f} s",
            f"  amplification  {self.amplification:,.3g} bytes fetched for each byte used",
            f"  requests       {self.requests_per_second:,.3g} shards a second",
            f"  stalls         {self.stalled:.1%} of the time after the first batch",
        ]


def simulate(
    order: BatchOrder, shard_bytes: NDArray[np.int64], node: Node, nodes: int = 1, number: int = 0, epochs: int = 1
) -> DataFlow:
    """Simulate node `number` of `nodes`, each with equally many rows of the batch, for some epochs.

    Args:
        shard_bytes: (n_shards,) bytes of each shard.
    """
    rows = slice(number * order.batch_size // nodes, (number + 1) * order.batch_size // nodes)
    state = _NodeState(order, shard_bytes, node, rows, epochs * order.steps_per_epoch)
    lane, streams = order.batch_size // order.interleave.streams, max(1, order.interleave.streams // nodes)
    stride = max(1, order.interleave.block // lane // (2 * streams))  # steps between two looks at the order
    first = state.needed_before(1)
    state.wait_for(1)
    first_seconds = state.time
    for step in range(0, state.end, stride):
        state.train(step, min(step + stride, state.end))
    size = DataSize(order.n, int(np.count_nonzero(shard_bytes)), int(shard_bytes.sum()))
    used = state.end * (rows.stop - rows.start) / order.batch_size * size.bytes / order.steps_per_epoch
    if state.window.is_too_small:
        return _estimate(size, order, node, nodes, rows.stop - rows.start)
    seconds = state.time - first_seconds
    return DataFlow(
        state.resident,
        first,
        first_seconds,
        state.fetched / used,
        state.requests / max(seconds, 1e-9),
        state.stalled / max(seconds, 1e-9),
    )


class _NodeState:
    """A node at a time: its cache, and the link that fills it."""

    def __init__(self, order: BatchOrder, shard_bytes: NDArray[np.int64], node: Node, rows: slice, end: int) -> None:
        self.end, self._epoch, self._node, self._sizes = end, order.steps_per_epoch, node, shard_bytes.tolist()
        self.window = RequestWindow(order.shards_ahead(0, 0, [rows]), self._sizes, int(node.cache))
        self.time = self.stalled = self.fetched = self.resident = 0.0
        self.requests = 0
        self._link_free = self._held = 0.0
        self._arrival: dict[int, float] = {}  # of the shards in the cache
        self._last: dict[int, int] = {}  # their last use that is known
        self._by_last: list[tuple[int, int]] = []  # heap, with outdated entries
        self._pending: list[tuple[int, float, int]] = []  # heap of (first use, arrival, shard)
        self._admit(0)

    def needed_before(self, step: int) -> float:
        """Return the bytes of the shards that will be waited for before `step`."""
        return float(sum(self._sizes[shard] for shard in {entry[2] for entry in self._pending if entry[0] < step}))

    def wait_for(self, step: int) -> None:
        """Wait for the shards that are used before `step`."""
        while self._pending and self._pending[0][0] < step:
            self.time = max(self.time, heappop(self._pending)[1])

    def train(self, begin: int, end: int) -> None:
        """Take the steps begin ... end - 1, waiting before them for what they need."""
        self._admit(begin)
        before = self.time
        self.wait_for(end)
        self.stalled += self.time - before
        self.time += (end - begin) * self._node.step_seconds

    def _admit(self, step: int) -> None:
        for request in self.window.move(step, min(step + self._epoch, self.end)):
            self._fetch(request)
        self.resident = max(self.resident, self.window.in_use + self.window.ahead)

    def _fetch(self, request: ShardRequest) -> None:
        shard, size = request.shard, self._sizes[request.shard]
        if shard not in self._arrival:
            self._make_room(size)
            self._held += size
            self._link_free = max(self._link_free, self.time) + size / self._node.bandwidth
            self._arrival[shard] = self._link_free
            self.fetched += size
            self.requests += 1
        self._last[shard] = max(self._last.get(shard, 0), request.last)
        heappush(self._by_last, (self._last[shard], shard))
        heappush(self._pending, (request.first, self._arrival[shard], shard))

    def _make_room(self, size: int) -> None:
        while self._held + size > self._node.cache and self._by_last:
            last, shard = heappop(self._by_last)
            if self._last.get(shard) == last:
                del self._last[shard], self._arrival[shard]
                self._held -= self._sizes[shard]


def _estimate(size: DataSize, order: BatchOrder, node: Node, nodes: int, rows: int) -> DataFlow:
    """Return what happens where a batch needs more shards than the cache holds: each may be absent at every step."""
    needed = size.resident_bytes(order.interleave, nodes)
    shard = size.bytes / size.shards
    touched = needed / shard * -np.expm1(-rows * shard / needed)  # different shards in the node's rows
    fetched = touched * shard * max(1 - node.cache / needed, 0.0)
    seconds = max(fetched / node.bandwidth, node.step_seconds)
    return DataFlow(
        needed,
        touched * shard,
        touched * shard / node.bandwidth,
        fetched / (rows * size.bytes / size.samples),
        fetched / shard / seconds,
        1 - node.step_seconds / seconds,
        is_estimate=True,
    )
