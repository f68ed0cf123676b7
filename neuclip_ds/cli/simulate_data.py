"""Simulate how the nodes of a run are supplied with shards: GB resident, first batch, read amplification, stalls.

With the order of samples and the cache policy of a run, on a data set of equal shards. The speeds of the node are
assumed; `--dry-run` of a run prints the same for its own data.

Examples:
  neuclip-ds simulate-data dfn192m_neuclip --samples 192e6 --nodes 1 8 64 --cache-gb 200 1000
  neuclip-ds simulate-data vith14_tuneclip --samples 12e6 --nodes 8 --rate 2000
"""

import argparse
from collections.abc import Sequence

import numpy as np

from neuclip_ds.cli.program import Parser
from neuclip_ds.config import DataConfig
from neuclip_ds.data.interleave import DataSize, Interleave, choose_interleave, first_interleave
from neuclip_ds.data.order import GlobalOrder
from neuclip_ds.errors import UserError
from neuclip_ds.planning.data_flow import BANDWIDTH, RATE, Node, simulate
from neuclip_ds.recipe import parse


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds simulate-data", description=__doc__)
    parser.add_argument("recipe", help="a recipe's name, or the path of a YAML file; options of the run may follow")
    parser.add_argument("--samples", type=float, default=192e6, help="size n of the data set")
    parser.add_argument("--shard-samples", type=int, default=10_000, help="samples in a shard")
    parser.add_argument("--sample-kb", type=float, default=45, help="KB of an image and its caption in a shard")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 64], help="numbers of nodes")
    parser.add_argument("--cache-gb", nargs="+", type=float, default=[1000], help="sizes of a node's cache")
    parser.add_argument("--bandwidth-gb", type=float, default=BANDWIDTH / 1e9, help="GB a second that a node fetches")
    parser.add_argument("--rate", type=float, default=RATE, help="samples a second that a node trains on")
    parser.add_argument("--epochs", type=int, default=1, help="epochs to simulate")
    parser.add_argument("--first-order", action="store_true", help="the order of versions that did not choose it")
    asked, overrides = parser.parse_with_overrides(arguments)
    data = parse([asked.recipe, *overrides]).config.data
    shards = -(-int(asked.samples) // asked.shard_samples)
    sizes = np.full(shards, asked.shard_samples)
    sizes[-1] = int(asked.samples) - (shards - 1) * asked.shard_samples
    shard_bytes = (sizes * asked.sample_kb * 1e3).astype(np.int64)
    size = DataSize(int(sizes.sum()), shards, int(shard_bytes.sum()))
    print(f"{size.samples:,} samples in {shards:,} shards of {size.bytes / 1e9:,.0f} GB, batch {data.batch_size:,}")
    for cache in asked.cache_gb:
        for nodes in asked.nodes:
            try:
                interleave = _interleave(asked, data, size, nodes, cache)
            except UserError as error:
                print(f"\n{nodes} nodes, {cache:g} GB: {error}")
                continue
            order = GlobalOrder(np.cumsum(sizes) - sizes, sizes, data.batch_size, 0, interleave, tail="drop")
            node = Node(1e9 * cache, 1e9 * asked.bandwidth_gb, data.batch_size / nodes / asked.rate)
            flow = simulate(order, shard_bytes, node, nodes, nodes // 2, asked.epochs)
            streams, window = interleave.streams, min(interleave.window, size.samples)
            print(f"\n{nodes} nodes, {cache:g} GB: {streams} streams, {window:,} samples shuffled together")
            print("\n".join(flow.lines()))


def _interleave(asked: argparse.Namespace, data: DataConfig, size: DataSize, nodes: int, cache: float) -> Interleave:
    if asked.first_order:
        return first_interleave(size.shards, data.batch_size, data.shard_streams, data.shuffle_block or 80_000)
    return choose_interleave(
        size,
        data.batch_size,
        nodes=nodes,
        cache_bytes=1e9 * cache,
        streams=data.shard_streams,
        block=data.shuffle_block,
    )
