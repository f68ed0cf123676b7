"""The time of a step on any number of nodes: latency and bandwidth of every collective, and the measured compute.

    step = max(busy (1 + skew) + exposed communication, pairs / loading rate)
    busy = slowdown (overhead + sharing x sum over kinds of work / rate)
    collective = slowdown (start + messages x latency + bytes by the ring / bandwidth)    (an all-reduce: ring or tree)

Kinds of work are operations of the towers, matrix products of the objective, elements that it writes, weights that
the optimizer updates, and parameters that ZeRO 3 handles one by one. Slowdown counts ranks that share a core, sharing
is what a rank loses to its neighbour's use of memory and execution units, skew what it waits for the slowest. Of a
collective that may travel while the rank computes, what exceeds that computation is exposed. All of this is
arithmetic; `neuclip-ds plan fit` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.distributed.ring import ring_bytes

_RATES = ("tower_rate", "objective_rate", "element_rate", "update_rate", "hook_rate")
_GRID = [number / 20 for number in range(21)]  # of sharing and skew
_FORWARD = 1 / 3  # of the towers' operations; the backward pass has twice as many


@dataclass(frozen=True)
class Network:
    """The network; seconds and bytes a second, in one direction."""

    start: float  # of a collective, whatever its size
    inner_latency: float  # of a message between two ranks of a node
    inner_bandwidth: float  # of a rank to the next in its node
    latency: float = 0.0  # of a message between nodes
    bandwidth: float = math.inf  # of a node, all its adapters together
    trees: bool = False  # whether small all-reduces go along trees, as NCCL's do


class Range(NamedTuple):
    """A quantity at both ends of what is assumed of a machine."""

    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Range:
        """Return the smallest and the largest value."""
        found = sorted(values)
        return Range(found[0], found[-1])


class Call(NamedTuple):
    """Equal collectives of a step."""

    purpose: str
    op: str  # as in `ring_bytes`
    size: int  # bytes that a rank puts in
    times: float = 1.0  # a step, on average


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
    """The computation rates of one rank, in units a second."""

    overhead: float  # seconds of a step that nothing below explains
    tower_rate: float  # floating-point operations of the towers
    objective_rate: float  # of the objective's matrix products
    element_rate: float  # elements that the objective's other operations write
    update_rate: float  # elements that the optimizer updates
    hook_rate: float  # parameters that ZeRO 3 fetches and releases one by one
    skew: float = 0.0  # share of the busy time that a rank waits for others
    cores: int | None = None  # that the ranks of a node share, one each as long as there are enough
    sharing: float = 0.0  # share by which all cores at once are slower than one alone
    overlaps_engine: bool = False  # whether DeepSpeed's collectives can run during the backward pass
    loading_rate: float = math.inf  # pairs that a rank's loader supplies

    def slowdown(self, ranks_per_node: int) -> float:
        """Return the factor on everything where ranks outnumber cores."""
        return 1.0 if self.cores is None else max(1.0, ranks_per_node / self.cores)

    def shared(self, ranks_per_node: int) -> float:
        """Return the factor by which neighbours slow work down."""
        if self.cores is None or self.cores == 1:
            return 1.0
        return 1 + self.sharing * (min(ranks_per_node, self.cores) - 1) / (self.cores - 1)


class Work(NamedTuple):
    """The work of a rank in a step."""

    tower_flops: float  # forward and backward
    image_share: float  # of them, in the image tower
    objective_flops: float
    objective_elements: float
    updated: float  # elements of weights
    hooks: int  # parameters that ZeRO 3 handles, none in other stages
    calls: Sequence[Call]
    overlaps: bool = False  # whether the engine's config asks for collectives beside the backward pass
    rows: int = 0  # pairs that are loaded; none in steps without a loader


class StepTime(NamedTuple):
    """Seconds of a step."""

    computation: float  # with everything else that a rank does alone
    objective: float  # of it
    communication: float
    exposed: float  # of it, what no computation hides
    waiting: float
    loading: float  # until the next batch is there, once all else is done

    @property
    def total(self) -> float:
        return self.computation + self.exposed + self.waiting + self.loading


def collective_seconds(op: str, size: int, cluster: Cluster) -> float:
    """Return the seconds of one collective; `op` and `size` as in `ring_bytes`."""
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
    """Return the seconds of a step of that work."""
    slowdown = compute.slowdown(cluster.ranks_per_node)
    shared = slowdown * compute.shared(cluster.ranks_per_node)
    towers = shared * work.tower_flops / compute.tower_rate
    products = work.objective_flops / compute.objective_rate
    objective = shared * (products + work.objective_elements / compute.element_rate)
    engine = work.updated / compute.update_rate + work.hooks / compute.hook_rate
    busy = slowdown * compute.overhead + towers + objective + shared * engine
    windows = {
        "image tower": _FORWARD * work.image_share * towers,
        "engine": (1 - _FORWARD) * towers if compute.overlaps_engine and work.overlaps else 0.0,
        "nothing": 0.0,
    }
    by_window = dict.fromkeys(windows, 0.0)
    for call in work.calls:
        window, hidden = _window(call)
        seconds = slowdown * collective_seconds(call.op, call.size, cluster)
        by_window[window] += hidden * seconds
        by_window["nothing"] += (call.times - hidden) * seconds
    exposed = sum(max(0.0, seconds - windows[name]) for name, seconds in by_window.items())
    waiting = compute.skew * busy if cluster.world_size > 1 else 0.0
    loading = max(0.0, work.rows / compute.loading_rate - (busy + exposed + waiting))
    return StepTime(busy, objective, sum(by_window.values()), exposed, waiting, loading)


def _window(call: Call) -> tuple[str, float]:
    """Return the computation that hides a collective, and of how many calls: nothing hides the last features."""
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
    transfers: Sequence[tuple[Call, float]]  # with the seconds of one call, without waiting


def fit(observations: Sequence[Observation], cores: int) -> tuple[Compute, Network]:
    """Return compute and network of the observed machine, by least squares of relative errors, none below zero.

    The network is fitted to the collectives' times. What it does not explain of the steps' times is fitted by the kinds
    of work, for each of a grid of values for sharing and skew.
    """
    network = _fit_network(observations, cores)
    # towers without end hide all that they can hide
    endless = Compute(0.0, 1.0, math.inf, math.inf, math.inf, math.inf, cores=cores)
    shapes = (replace(endless, sharing=sharing, skew=skew) for sharing, skew in product(_GRID, _GRID))
    best, _ = min((_fit_work(observations, shape, network) for shape in shapes), key=lambda found: found[1])
    return best, network


def _fit_work(observations: Sequence[Observation], shape: Compute, network: Network) -> tuple[Compute, float]:
    """Return overhead and rates for given sharing and skew, and the squared relative errors."""
    rows, seconds = [], []
    for one in observations:
        exposed = step_time(one.work, shape, Cluster(1, one.world_size, network)).exposed
        waits = 1 + (shape.skew if one.world_size > 1 else 0.0)
        slowdown = waits * shape.slowdown(one.world_size)
        shared = slowdown * shape.shared(one.world_size)
        work = one.work
        kinds = (work.tower_flops, work.objective_flops, work.objective_elements, work.updated, work.hooks)
        # relative to the whole step, of which communication is given
        rows.append([part / one.total for part in (slowdown, *(shared * kind for kind in kinds))])
        seconds.append(1 - exposed / one.total)
    found, error = _nonnegative_fit(rows, seconds)
    rates: dict[str, Any] = dict(zip(_RATES, map(_rate, found[1:]), strict=True))
    return replace(shape, overhead=found[0], **rates), error


def _fit_network(observations: Iterable[Observation], cores: int) -> Network:
    """Fit the network to the sum over a step's collectives: single ones scatter by a factor of ten."""
    rows, seconds = [], []
    for one in observations:
        if one.world_size == 1:
            continue
        sums = torch.zeros(3, dtype=torch.float64)
        for call, _ in one.transfers:
            messages = (2 if call.op == "all_reduce" else 1) * (one.world_size - 1)
            parts = (1.0, messages, ring_bytes(call.op, call.size, one.world_size))
            sums += call.times * torch.tensor(parts, dtype=torch.float64)
        took = sum(call.times * transfer for call, transfer in one.transfers)
        rows.append((max(1.0, one.world_size / cores) * sums / took).tolist())
        seconds.append(1.0)
    start, latency, by_byte = _nonnegative_fit(rows, seconds)[0] if rows else (0.0, 0.0, 0.0)
    return Network(start, latency, _rate(by_byte))


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf


def _nonnegative_fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[list[float], float]:
    """Return the non-negative coefficients of least squares and the sum of squares; all subsets are tried."""
    matrix, wanted = torch.tensor(rows, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)
    columns = matrix.shape[1]
    unit = matrix.abs().amax(dim=0).clamp(min=torch.finfo(torch.float64).tiny)  # columns differ by 1e12
    scaled = matrix / unit
    best, least = torch.zeros(columns, dtype=torch.float64), float(wanted.square().sum())
    for count in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), count)):
            found: Tensor = torch.linalg.lstsq(scaled[:, chosen], wanted).solution
            error = float((scaled[:, chosen] @ found - wanted).square().sum())
            if bool((found >= 0).all()) and error < least:
                best = torch.zeros(columns, dtype=torch.float64)
                best[chosen], least = found / unit[chosen], error
    return [float(value) for value in best], least


def to_json(compute: Compute, network: Network) -> dict[str, Any]:
    """Return a machine as JSON keeps it, without infinite rates."""
    return {
        name: {key: value for key, value in asdict(part).items() if value != math.inf}
        for name, part in (("compute", compute), ("network", network))
    }


def from_json(machine: Mapping[str, Any]) -> tuple[Compute, Network]:
    """Invert `to_json`."""
    rates = dict.fromkeys(_RATES, math.inf)
    return Compute(**{**rates, **machine["compute"]}), Network(**{"inner_bandwidth": math.inf, **machine["network"]})
