"""How long a step takes on any number of nodes: latency and bandwidth of every collective, and the measured compute.

    step = busy (1 + skew) + exposed communication
    busy = slowdown (overhead + flops of towers / rate + flops of the objective / rate + updated elements / rate)
    collective = start + messages x latency + bytes by the ring / bandwidth          (an all-reduce: ring or tree)

Slowdown counts ranks that share a core, skew is what a rank waits for the slowest. Of a collective that may travel
while the rank computes, what exceeds that computation is exposed. All of this is arithmetic; `tools/plan.py` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.distributed.ring import ring_bytes
from neuclip_ds.distributed.simulated import Call

_FORWARD = 1 / 3  # of the towers' operations; the backward pass has twice as many


@dataclass(frozen=True)
class Network:
    """What carries messages; seconds and bytes a second, in one direction."""

    start: float  # of a collective, whatever its size
    inner_latency: float  # of a message between two ranks of a node
    inner_bandwidth: float  # of a rank to the next in its node
    latency: float = 0.0  # of a message between nodes
    bandwidth: float = math.inf  # of a node, all its adapters together
    trees: bool = False  # whether small all-reduces go along trees, as NCCL's do


class Cluster(NamedTuple):
    """Ranks on nodes."""

    nodes: int
    ranks_per_node: int
    network: Network

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Compute:
    """What one rank computes, in units a second."""

    overhead: float  # seconds of a step that nothing below explains
    tower_rate: float  # floating-point operations of the towers
    objective_rate: float  # of the objective's matrix products
    update_rate: float  # elements that the optimizer updates
    skew: float = 0.0  # share of the busy time that a rank waits for others
    cores: int | None = None  # that the ranks of a node share, one each as long as there are enough
    overlaps_engine: bool = False  # whether DeepSpeed's collectives can run beside the backward pass

    def slowdown(self, ranks_per_node: int) -> float:
        return 1.0 if self.cores is None else max(1.0, ranks_per_node / self.cores)


class Work(NamedTuple):
    """What a rank has to do in a step."""

    tower_flops: float  # forward and backward
    image_share: float  # of them, in the image tower
    objective_flops: float
    updated: float  # elements of weights
    calls: Sequence[Call]
    overlaps: bool = False  # whether the engine's config asks for collectives beside the backward pass


class StepTime(NamedTuple):
    """Seconds of a step."""

    computation: float  # with everything else that a rank does by itself
    objective: float  # of it
    communication: float
    exposed: float  # of it, what no computation hides
    waiting: float

    @property
    def total(self) -> float:
        return self.computation + self.exposed + self.waiting


def collective_seconds(op: str, size: int, cluster: Cluster) -> float:
    """Seconds of one collective; `op` and `size` as in `ring_bytes`."""
    ranks, network = cluster.world_size, cluster.network
    if ranks == 1:
        return 0.0
    between = cluster.nodes > 1
    bandwidth = min(network.inner_bandwidth, network.bandwidth) if between else network.inner_bandwidth
    hop = max(network.latency, network.inner_latency) if between else network.inner_latency
    rounds = 2 if op == "all_reduce" else 1
    messages = rounds * (ranks - 1) * hop
    if op == "all_reduce" and network.trees:
        depth = math.ceil(math.log2(cluster.nodes)) * network.latency
        messages = min(messages, 2 * (depth + (cluster.ranks_per_node - 1) * network.inner_latency))
    return network.start + messages + ring_bytes(op, size, ranks) / bandwidth


def step_time(work: Work, compute: Compute, cluster: Cluster) -> StepTime:
    """Seconds of a step of that work."""
    slowdown = compute.slowdown(cluster.ranks_per_node)
    towers = slowdown * work.tower_flops / compute.tower_rate
    objective = slowdown * work.objective_flops / compute.objective_rate
    busy = slowdown * compute.overhead + towers + objective + slowdown * work.updated / compute.update_rate
    by_window = {"image tower": 0.0, "engine": 0.0, "nothing": 0.0}
    for call in work.calls:
        window, hidden = _window(call)
        seconds = collective_seconds(call.op, call.size, cluster)
        by_window[window] += hidden * seconds
        by_window["nothing"] += (call.times - hidden) * seconds
    windows = {
        "image tower": _FORWARD * work.image_share * towers,
        "engine": (1 - _FORWARD) * towers if compute.overlaps_engine and work.overlaps else 0.0,
        "nothing": 0.0,
    }
    exposed = sum(max(0.0, seconds - windows[name]) for name, seconds in by_window.items())
    waiting = compute.skew * busy if cluster.world_size > 1 else 0.0
    return StepTime(busy, objective, sum(by_window.values()), exposed, waiting)


def _window(call: Call) -> tuple[str, float]:
    """Under what a collective travels, and how many of these calls: the last image features come when all is done."""
    if call.purpose == "state":
        return "image tower", call.times
    if call.purpose == "features":
        return "image tower", max(0.0, call.times - 1)
    if call.purpose in ("gradient reduce", "parameter gather"):
        return "engine", call.times
    return "nothing", 0.0


class Observation(NamedTuple):
    """A profiled configuration."""

    work: Work
    world_size: int  # on one node
    total: float  # seconds a step
    busy: float  # of them, without communication
    transfers: Sequence[tuple[Call, float]]  # with the seconds of one call, without waiting


def fit(observations: Sequence[Observation], cores: int) -> tuple[Compute, Network]:
    """Compute and network of the machine that was observed, by least squares of relative errors, none below zero."""
    scale = [max(1.0, one.world_size / cores) for one in observations]
    rows = [
        [s, s * one.work.tower_flops, s * one.work.objective_flops, s * one.work.updated]
        for s, one in zip(scale, observations, strict=True)
    ]
    overhead, tower, objective, update = _nonnegative_fit(rows, [one.busy for one in observations])
    network = _fit_network(observations)
    compute = Compute(overhead, _rate(tower), _rate(objective), _rate(update), cores=cores)
    several = [one for one in observations if one.world_size > 1]
    rest = []
    for one in several:
        found = step_time(one.work, compute, Cluster(1, one.world_size, network))
        rest.append((one.total - found.total) / found.computation)
    skew = max(0.0, sum(rest) / len(rest)) if rest else 0.0
    return Compute(**{**asdict(compute), "skew": skew}), network


def _fit_network(observations: Iterable[Observation]) -> Network:
    rows, seconds = [], []
    for one in observations:
        for call, transfer in one.transfers if one.world_size > 1 else ():
            rounds = 2 if call.op == "all_reduce" else 1
            messages = rounds * (one.world_size - 1)
            rows.append([1.0, messages, ring_bytes(call.op, call.size, one.world_size)])
            seconds.append(transfer)
    start, latency, by_byte = _nonnegative_fit(rows, seconds) if rows else (0.0, 0.0, 0.0)
    return Network(start, latency, _rate(by_byte))


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf


def _nonnegative_fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Coefficients, none negative, with the least squares of (row . coefficients)/target - 1: all subsets are tried."""
    wanted = torch.tensor(targets, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / wanted[:, None]
    columns = matrix.shape[1]
    unit = matrix.abs().amax(dim=0).clamp(min=torch.finfo(torch.float64).tiny)  # columns differ by 1e12
    best, least = torch.zeros(columns, dtype=torch.float64), math.inf
    for count in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), count)):
            found: Tensor = torch.linalg.lstsq((matrix / unit)[:, chosen], torch.ones_like(wanted)).solution
            error = float(((matrix / unit)[:, chosen] @ found - 1).square().sum())
            if bool((found >= 0).all()) and error < least:
                best = torch.zeros(columns, dtype=torch.float64)
                best[chosen], least = found / unit[chosen], error
    return [float(value) for value in best]


def to_json(compute: Compute, network: Network) -> dict[str, Any]:
    """A machine as JSON keeps it: infinite rates are left out."""
    return {
        name: {key: value for key, value in asdict(part).items() if value != math.inf}
        for name, part in (("compute", compute), ("network", network))
    }


def from_json(machine: Mapping[str, Any]) -> tuple[Compute, Network]:
    """The inverse of `to_json`."""
    rates = dict.fromkeys(("tower_rate", "objective_rate", "update_rate"), math.inf)
    return Compute(**{**rates, **machine["compute"]}), Network(**{"inner_bandwidth": math.inf, **machine["network"]})
