"""Estimate a recipe's step time and traffic on nodes of eight H100 GPUs, without measurements on such nodes.

The work of a step and all its collectives are counted on one simulated rank (step_costs.py). The estimate is

    step = max(busy (1 + skew) + exposed communication, pairs / loading rate)
    busy = overhead + sum over kinds of work / rate
    collective = start + messages x latency + bytes by the ring / bandwidth    (an all-reduce: ring or tree)

The kinds of work are those of `step_costs.Work`. Skew is the wait for the slowest rank as a fraction of the busy time.
If a collective can overlap computation, only its excess over this computation is exposed. The peak rates come from the
vendors' data sheets. The program prints ranges, because the fraction of a peak rate that training reaches is assumed:
the slow end of a range uses rates near the slow end of those that published step times imply, and the fast end uses the
rates that we aim for.

Example:
  python tools/cost_model.py dfn192m_neuclip --methods openclip_reference openclip neuclip --nodes 1 8 64 --rows 640
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarking.method_config import STORED_WIDTH, config_for
from benchmarking.openclip_reference import REFERENCES
from benchmarking.run_loss import build_loss
from step_costs import Call, CountedModel, Work, count_model, step_work

from neuclip_ds.cli.program import Parser, exit_on_mistake
from neuclip_ds.distributed.communicator import ring_bytes
from neuclip_ds.recipe import parse

RANKS_PER_NODE = 8
_FORWARD = 1 / 3  # forward pass's fraction of the towers' operations; the backward pass has twice as many

# an H100 SXM with 80 GB: dense bf16 and float32 without tensor cores, HBM3, NVLink 4 in one direction
_TOWER_FLOPS = 989e12
_OBJECTIVE_FLOPS = 67e12 * 0.5  # half of the peak
_MEMORY_BANDWIDTH = 3350e9  # bytes per second
_LINK_BANDWIDTH = 450e9
_NODE_BANDWIDTH = 400e9 * 0.8  # of eight InfiniBand adapters of 400 Gb/s together, with their protocol
_BYTES_PER_ELEMENT = 8  # of the objective's operations between products: one float32 is read and one written
_BYTES_PER_UPDATE = 30  # AdamW reads gradient, master and moments, and writes master, moments and bf16 weight


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Computation rates of one rank, per second."""

    overhead: float  # seconds of a step that the rates below do not explain: Python, kernel launches, copies
    tower_rate: float  # floating-point operations of the towers
    objective_rate: float = _OBJECTIVE_FLOPS  # floating-point operations of the objective's matrix products
    element_rate: float = _MEMORY_BANDWIDTH / _BYTES_PER_ELEMENT  # elements that the objective's other operations write
    update_rate: float = _MEMORY_BANDWIDTH / _BYTES_PER_UPDATE  # elements that the optimizer updates
    hook_rate: float = 2e4  # parameters that ZeRO 3 fetches and releases one by one
    skew: float = 0.02  # time that a rank waits for others, as a fraction of its busy time
    loading_rate: float = math.inf  # pairs that a rank's loader supplies


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network between ranks: times in seconds, and bandwidths in bytes per second in one direction."""

    start: float = 1e-5  # time to start a collective of any size
    inner_latency: float = 2e-6  # latency of a message between two ranks of a node
    inner_bandwidth: float  # bandwidth from a rank to the next rank in its node
    latency: float = 5e-6  # latency of a message between nodes
    bandwidth: float  # bandwidth of all of a node's adapters together


# near the slow end of published_rates.csv: 13% of the peak while the towers compute; bandwidths include the wait for
# other ranks
SLOW_COMPUTE = Compute(overhead=0.12, tower_rate=0.13 * _TOWER_FLOPS, loading_rate=570)
SLOW_NETWORK = Network(inner_bandwidth=8e9, bandwidth=2e9)
# the aim: the towers reach 40% of the peak, a link reaches 80%, and training never waits for the loader
FAST_COMPUTE = Compute(overhead=0.01, tower_rate=0.4 * _TOWER_FLOPS)
FAST_NETWORK = Network(inner_bandwidth=0.8 * _LINK_BANDWIDTH, bandwidth=_NODE_BANDWIDTH)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A number of identical nodes and the network between their ranks."""

    nodes: int
    ranks_per_node: int = RANKS_PER_NODE
    network: Network

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Estimated seconds of a step, by part."""

    computation: float  # including all other work that a rank does alone
    exposed: float  # communication that no computation hides
    waiting: float
    loading: float  # wait for the next batch after all other work

    @property
    def total(self) -> float:
        return self.computation + self.exposed + self.waiting + self.loading


def collective_seconds(op: str, size: int, cluster: Cluster) -> float:
    """Return the seconds of one collective; `op` and `size` are as in `ring_bytes`."""
    ranks = cluster.world_size
    network = cluster.network
    if ranks == 1:
        return 0.0
    bandwidth = network.inner_bandwidth
    hop = network.inner_latency
    if cluster.nodes > 1:
        bandwidth = min(bandwidth, network.bandwidth)
        hop = max(hop, network.latency)
    rounds = 2 if op == "all_reduce" else 1
    messages = rounds * (ranks - 1) * hop
    if op == "all_reduce":  # NCCL uses trees for small tensors
        depth = math.ceil(math.log2(cluster.nodes)) * network.latency
        tree_messages = 2 * (depth + (cluster.ranks_per_node - 1) * network.inner_latency)
        messages = min(messages, tree_messages)
    return network.start + messages + ring_bytes(op, size, ranks) / bandwidth


def step_time(work: Work, compute: Compute, cluster: Cluster) -> StepTime:
    """Return the estimated seconds of a step that does this work."""
    towers = work.tower_flops / compute.tower_rate
    objective = work.objective_flops / compute.objective_rate + work.objective_elements / compute.element_rate
    engine = work.updated / compute.update_rate + work.hooks / compute.hook_rate
    busy = compute.overhead + towers + objective + engine
    # the seconds of computation that can hide collectives
    windows = {
        "image tower": _FORWARD * work.image_share * towers,
        "backward": (1 - _FORWARD) * towers if work.overlaps else 0.0,
        "nothing": 0.0,
    }
    communication = dict.fromkeys(windows, 0.0)
    for call in work.calls:
        window, hidden_calls = _window(call, work)
        seconds = collective_seconds(call.op, call.size, cluster)
        communication[window] += hidden_calls * seconds
        communication["nothing"] += (call.times - hidden_calls) * seconds
    exposed = sum(max(0.0, seconds - windows[window]) for window, seconds in communication.items())
    waiting = compute.skew * busy if cluster.world_size > 1 else 0.0
    loading = max(0.0, work.rows / compute.loading_rate - (busy + exposed + waiting))
    return StepTime(computation=busy, exposed=exposed, waiting=waiting, loading=loading)


def _window(call: Call, work: Work) -> tuple[str, float]:
    """Return the computation that can hide a collective, and the number of calls that it can hide.

    The gather of the last features cannot be hidden.
    """
    if call.purpose in ("state", "stored_features"):  # stored features are sent before the towers run
        return "image tower", call.times
    if call.purpose == "features":
        return "image tower", max(0.0, call.times - 1)
    if call.purpose == "gradient reduce" or (call.purpose == "parameter gather" and work.hooks):
        return "backward", call.times  # below ZeRO 3, weights are gathered after the update
    return "nothing", 0.0


def time_range(work: Work, nodes: int) -> tuple[float, float]:
    """Return the lowest and the highest estimate of a step's duration, in seconds."""
    totals = []
    for compute, network in itertools.product((SLOW_COMPUTE, FAST_COMPUTE), (SLOW_NETWORK, FAST_NETWORK)):
        totals.append(step_time(work, compute, Cluster(nodes=nodes, network=network)).total)
    return min(totals), max(totals)


def table(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table, with a row for every combination of method and number of nodes."""
    methods = options.methods or [parse([options.recipe, *overrides]).config.objective.method]
    model: CountedModel | None = None
    lines = ["| loss | nodes | batch | step, ms | MB received per rank |", "|---|---|---|---|---|"]
    for method, nodes in itertools.product(methods, options.nodes):
        ranks = nodes * RANKS_PER_NODE
        batch = [f"--data.batch_size={options.rows * ranks}"] if options.rows else []
        config = config_for(None if method in REFERENCES else method, [options.recipe, *batch, *overrides])
        if model is None:
            model = count_model(config)
        work = step_work(config, model, ranks, REFERENCES.get(method, build_loss), options.stored_width)
        low, high = time_range(work, nodes)
        received = sum(call.times * ring_bytes(call.op, call.size, ranks) for call in work.calls)
        lines.append(
            f"| {method} | {nodes} | {config.data.batch_size:,} | {1e3 * low:,.0f} - {1e3 * high:,.0f} "
            f"| {received / 1e6:,.0f} |"
        )
    return lines


def main() -> None:
    parser = Parser(prog="cost_model.py", description=__doc__)
    parser.add_argument("recipe", help="a recipe's name, or the path of a YAML file; config options may follow")
    parser.add_argument("--methods", nargs="+", help="methods to compare (default: the recipe's method)")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 64], help="numbers of nodes to estimate")
    parser.add_argument("--rows", type=int, help="pairs per rank (default: the recipe's batch, divided by the ranks)")
    parser.add_argument("--stored-width", type=int, help=STORED_WIDTH)
    with exit_on_mistake():
        options, overrides = parser.parse_with_overrides(sys.argv[1:])
        print("\n".join(table(options, overrides)))


if __name__ == "__main__":
    main()
