"""Simulate how shards are supplied to the nodes of a run: resident GB, first batch, read amplification and stalls.

The sample order and cache policy are those of a run, but the shards are synthetic and the speeds of the node are
assumed. Shards arrive one after another at the node's bandwidth; the cache evicts the least recently used shards. A
step waits for whole shards, so a run whose manifest has sample tables gets its first batch earlier than simulated.

Examples:
  python tools/simulate_data.py dfn192m_neuclip --samples 192e6 --nodes 1 8 64 --cache-gb 200 1000
  python tools/simulate_data.py vith14_tuneclip --samples 12e6 --nodes 8 --rate 2000
"""

import math
import sys
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuclip_ds.cli.program import Parser, exit_on_mistake
from neuclip_ds.data.interleave import Interleave, choose_interleave
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.data.prefetch import RequestWindow, ShardRequest, shards_ahead
from neuclip_ds.errors import UserError, counted
from neuclip_ds.recipe import parse

SHARD_SAMPLES = 10_000


class Node(NamedTuple):
    """A node's cache and bandwidth for data, and its step time."""

    cache: float  # bytes
    bandwidth: float  # bytes per second
    step_seconds: float  # of a training step that does not wait for data


@dataclass(frozen=True, kw_only=True)
class DataFlow:
    """The simulated data flow of a node in a part of a run."""

    resident: float  # peak bytes of the shards in use and prefetched
    first: float  # bytes of the shards that the first batch needs
    first_seconds: float  # seconds until these shards have arrived
    amplification: float  # bytes fetched for each byte used
    requests_per_second: float  # shards fetched per second
    stalled: float  # fraction of the time after the first batch in which training waits
    is_estimate: bool = False

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        estimated = " (estimated: the cache is too small for a batch)" if self.is_estimate else ""
        return [
            f"  resident       {self.resident / 1e9:,.1f} GB of shards at most, including prefetched ones{estimated}",
            f"  first batch    {self.first / 1e9:,.1f} GB, {self.first_seconds:,.0f} s",
            f"  amplification  {self.amplification:,.3g} bytes fetched for each byte used",
            f"  requests       {self.requests_per_second:,.3g} shards per second",
            f"  stalls         {self.stalled:.1%} of the time after the first batch",
        ]


def simulate(
    order: GlobalOrder, shard_bytes: NDArray[np.int64], node: Node, nodes: int = 1, number: int = 0, epochs: int = 1
) -> DataFlow:
    """Simulate node `number` of `nodes`, which divide the rows of the batch equally, for `epochs` epochs.

    Args:
        shard_bytes: (n_shards,) bytes of each shard.
    """
    rows = slice(number * order.batch_size // nodes, (number + 1) * order.batch_size // nodes)
    state = _NodeState(order, shard_bytes, node, rows, epochs * order.steps_per_epoch)
    rows_per_stream = order.batch_size // order.interleave.streams  # in a batch
    streams = max(1, order.interleave.streams // nodes)
    block = min(order.interleave.block, int(order.stream_lengths.min()))
    stride = max(1, block // rows_per_stream // (2 * streams))  # steps between two reads of the order
    first = state.needed_before(1)
    state.wait_for(1)
    first_seconds = state.time
    for step in range(0, state.end, stride):
        state.train(step, min(step + stride, state.end))
    if state.window.is_too_small:
        return _estimate(order, shard_bytes, node, nodes, rows.stop - rows.start)
    used = state.end * (rows.stop - rows.start) / order.batch_size * int(shard_bytes.sum()) / order.steps_per_epoch
    seconds = max(state.time - first_seconds, 1e-9)
    return DataFlow(
        resident=state.resident,
        first=first,
        first_seconds=first_seconds,
        amplification=state.fetched / used,
        requests_per_second=state.requests / seconds,
        stalled=state.stalled / seconds,
    )


class _NodeState:
    """State of a simulated node: its cache, and the link that fills the cache."""

    def __init__(self, order: GlobalOrder, shard_bytes: NDArray[np.int64], node: Node, rows: slice, end: int) -> None:
        self.end = end
        self._epoch = order.steps_per_epoch
        self._node = node
        self._sizes = shard_bytes.tolist()
        self.window = RequestWindow(shards_ahead(order, 0, 0, [rows]), self._sizes, int(node.cache))
        self.time = 0.0  # seconds so far
        self.stalled = 0.0  # seconds of waiting so far
        self.fetched = 0.0  # bytes
        self.resident = 0.0  # peak bytes of the window
        self.requests = 0
        self._link_free_at = 0.0
        self._cached_bytes = 0.0
        self._arrival: dict[int, float] = {}  # time of arrival of each shard in the cache
        self._last_use: dict[int, int] = {}  # step of each shard's last known use
        self._by_last_use: list[tuple[int, int]] = []  # heap, with outdated entries
        self._pending: list[tuple[int, float, int]] = []  # heap of (first use, arrival, shard)
        self._admit(0)

    def needed_before(self, step: int) -> float:
        """Return the bytes of the pending shards that are used before `step`."""
        shards = {shard for first_use, _, shard in self._pending if first_use < step}
        return float(sum(self._sizes[shard] for shard in shards))

    def wait_for(self, step: int) -> None:
        """Wait for the shards that are used before `step`."""
        while self._pending and self._pending[0][0] < step:
            _, arrival, _ = heappop(self._pending)
            self.time = max(self.time, arrival)

    def train(self, begin: int, end: int) -> None:
        """Take the steps begin ... end - 1, after waiting for the shards that they need."""
        self._admit(begin)
        before = self.time
        self.wait_for(end)
        self.stalled += self.time - before
        self.time += (end - begin) * self._node.step_seconds

    def _admit(self, step: int) -> None:
        for request in self.window.move(step, min(step + self._epoch, self.end)):
            self._fetch(request)
        self.resident = max(self.resident, self.window.bytes)

    def _fetch(self, request: ShardRequest) -> None:
        shard = request.shard
        size = self._sizes[shard]
        if shard not in self._arrival:
            self._make_room(size)
            self._cached_bytes += size
            self._link_free_at = max(self._link_free_at, self.time) + size / self._node.bandwidth
            self._arrival[shard] = self._link_free_at
            self.fetched += size
            self.requests += 1
        self._last_use[shard] = max(self._last_use.get(shard, 0), request.last)
        heappush(self._by_last_use, (self._last_use[shard], shard))
        heappush(self._pending, (request.first, self._arrival[shard], shard))

    def _make_room(self, size: int) -> None:
        while self._cached_bytes + size > self._node.cache and self._by_last_use:
            last_use, shard = heappop(self._by_last_use)
            if self._last_use.get(shard) == last_use:
                del self._last_use[shard]
                del self._arrival[shard]
                self._cached_bytes -= self._sizes[shard]


def _estimate(order: GlobalOrder, shard_bytes: NDArray[np.int64], node: Node, nodes: int, rows: int) -> DataFlow:
    """Estimate the data flow if the cache cannot store all shards of a batch: any shard may be absent at any step."""
    needed = order.resident_bytes(shard_bytes, nodes)
    mean_shard = float(shard_bytes.mean())
    touched = needed * -np.expm1(-rows * mean_shard / needed)  # bytes of distinct shards in the node's rows
    fetched = touched * max(1 - node.cache / needed, 0.0)
    seconds = max(fetched / node.bandwidth, node.step_seconds)
    return DataFlow(
        resident=needed,
        first=touched,
        first_seconds=touched / node.bandwidth,
        amplification=fetched / (rows * shard_bytes.sum() / order.n),
        requests_per_second=fetched / mean_shard / seconds,
        stalled=1 - node.step_seconds / seconds,
        is_estimate=True,
    )


def main() -> None:
    parser = Parser(prog="simulate_data.py", description=__doc__)
    parser.add_argument("recipe", help="a recipe's name, or the path of a YAML file; config options may follow")
    parser.add_argument(
        "--samples", type=float, default=192e6, help="samples n in the dataset, in shards of 10,000 on average"
    )
    parser.add_argument("--sample-kb", type=float, default=45, help="size of a sample in a shard, in KB")
    parser.add_argument(
        "--sigma",
        type=float,
        default=0,
        help="sigma of the lognormal distribution of shard sizes; with 0, all are equal",
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 64], help="numbers of nodes")
    parser.add_argument("--cache-gb", nargs="+", type=float, default=[1000], help="sizes of a node's cache, in GB")
    parser.add_argument(
        "--bandwidth-gb", type=float, default=1.25, help="download bandwidth of a node, in GB per second"
    )
    parser.add_argument(
        "--rate", type=float, default=10_000, help="speed of a node that does not wait for data, in samples per second"
    )
    parser.add_argument("--epochs", type=int, default=1, help="epochs to simulate")
    with exit_on_mistake():
        options, overrides = parser.parse_with_overrides(sys.argv[1:])
        data = parse([options.recipe, *overrides]).config.data
    n = int(options.samples)
    relative_sizes = np.random.default_rng(0).lognormal(0, options.sigma, -(-n // SHARD_SAMPLES))
    ends = np.cumsum(relative_sizes) / relative_sizes.sum()
    sizes = np.diff(np.floor(n * np.append(0, ends)).astype(np.int64))
    shard_bytes = (sizes * options.sample_kb * 1e3).astype(np.int64)
    print(
        f"{n:,} samples in {len(sizes):,} shards, {shard_bytes.sum() / 1e9:,.0f} GB in all; batch {data.batch_size:,}"
    )

    def order_of(interleave: Interleave) -> GlobalOrder:
        return GlobalOrder(np.cumsum(sizes) - sizes, sizes, data.batch_size, 0, interleave, drop_last=True)

    for cache in options.cache_gb:
        for nodes in options.nodes:
            try:
                interleave = choose_interleave(
                    len(sizes),
                    data.batch_size,
                    nodes=nodes,
                    cache_bytes=1e9 * cache,
                    resident_bytes=lambda candidate, count: order_of(candidate).resident_bytes(shard_bytes, count),
                    streams=data.shard_streams,
                    block=data.shuffle_block_size,
                )
            except UserError as error:
                print(f"\n{counted(nodes, 'node')}, {cache:g} GB: {error}")
                continue
            order = order_of(interleave)
            node = Node(1e9 * cache, 1e9 * options.bandwidth_gb, data.batch_size / nodes / options.rate)
            flow = simulate(order, shard_bytes, node, nodes, nodes // 2, options.epochs)
            window = min(math.prod(interleave), n)
            title = f"{counted(nodes, 'node')}, {cache:g} GB: {counted(interleave.streams, 'stream')}"
            print(f"\n{title}, {window:,} samples shuffled together")
            print(
                f"  planned        {order.resident_bytes(shard_bytes, nodes) / 1e9:,.1f} GB of shards in use at a time"
            )
            print("\n".join(flow.lines()))


if __name__ == "__main__":
    main()
