"""Count the traffic and operations of one rank's training step without data or other ranks, and predict its time.

There are no formulas for the objectives. Instead, an objective runs on a few rows of a `SimulatedRank` at several
sizes, and its traffic and operations are extrapolated. The size of a collective is linear in rows and prototypes and
quadratic in width, like a network's weights; operations are a low-degree polynomial in rows, width and prototypes. A
new method therefore needs no code here. DeepSpeed's collectives follow the rules in zero_rules.py. Tests compare every
collective exactly with profiled steps (tests/profiling/test_profile_ranks.py).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from benchmarking.synthetic_profile import prototypes_of
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from zero_rules import ZeroRules

from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator, Pending, ring_bytes
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import parameter_groups
from neuclip_ds.engine.zero import Wrapper
from neuclip_ds.models.recompute import checkpointed_blocks
from neuclip_ds.models.towers import Encoder
from neuclip_ds.models.trained_parts import TOWERS, block_names
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.normalizers import amortized
from neuclip_ds.planning.memory import MemoryQuery

Build = Callable[[Config, Context, torch.dtype], Objective]
_WARM_UP = 2  # steps; by then NeuCLIP has drawn its prototypes
_DIM = 4
_ALIGNMENT = 2  # DeepSpeed pads a rank's part of a group to a multiple of this many elements
_FLOAT, _DOUBLE = 4, 8
_FORWARD = 1 / 3  # forward pass's fraction of the towers' operations; the backward pass has twice as many


class Call(NamedTuple):
    """A collective, and how often a step calls it."""

    purpose: str
    op: str  # as in `ring_bytes`
    size: int  # bytes of a rank's input
    times: float = 1.0  # calls per step, on average


class Work(NamedTuple):
    """The work of a rank in a step."""

    tower_flops: float  # forward and backward
    image_share: float  # fraction of tower_flops in the image tower
    objective_flops: float
    objective_elements: float
    updated: float  # elements of weights that the optimizer updates
    hooks: int  # number of parameters that ZeRO 3 fetches; 0 in other stages
    calls: Sequence[Call]
    overlaps: bool = False  # whether the engine's config overlaps collectives with the backward pass
    rows: int = 0  # number of pairs that are loaded; 0 without a loader


class CountedModel(NamedTuple):
    """Sizes and operations of the towers, which do not depend on the batch."""

    shapes: TrainedShapes
    dim: int  # d of the features
    image: TowerFlops
    text: TowerFlops
    checkpointed: Sequence[float]  # fractions of the image tower's and the text tower's blocks


class TowerFlops(NamedTuple):
    """The operations of a tower on one image or one caption."""

    forward: float
    backward: float  # twice `forward` if all layers train, 0 if none does

    def of_step(self, pieces: int, checkpointed: float, stage: int) -> float:
        """Return a step's operations on one input; `checkpointed` is the fraction of blocks that are recomputed."""
        again = self.forward if pieces > 1 and (self.backward or stage == 3) else 0.0
        return self.forward + self.backward + again + checkpointed * self.backward / 2


def count_model(config: Config) -> CountedModel:
    """Count the config's model on the meta device.

    Raises:
        UserError: the model's checkpoint cannot be found.
    """
    query = MemoryQuery(config, 1)
    model, wanted = query.build(), config.model.activation_checkpointing
    towers = [(model.get_submodule(name), name) for name in TOWERS]
    shares = [len(checkpointed_blocks(*one, wanted)) / max(1, len(list(block_names(one[0])))) for one in towers]
    shapes = TrainedShapes.of(model, config.optimizer)
    return CountedModel(shapes, query.source.embed_dim, *count_flops(query), shares)


def count_flops(query: MemoryQuery) -> tuple[TowerFlops, TowerFlops]:
    """Return the operations on one image and on one caption, without recomputation by activation checkpointing."""
    kept = query.config.model.model_copy(update={"activation_checkpointing": False})
    query = replace(query, config=query.config.model_copy(update={"model": kept}))
    model, size = query.build(), query.source.preprocessing.size
    with torch.device("meta"):
        image = torch.empty(1, 3, size, size, dtype=torch.uint8)
        tokens = torch.empty(1, query.tokenizer.context_length, dtype=torch.int64)
        return _tower_flops(model.vision, image), _tower_flops(model.text, tokens)


def _tower_flops(tower: Encoder, inputs: Tensor) -> TowerFlops:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(inputs)
    forward = float(counter.get_total_flops())
    if not any(weight.requires_grad for weight in tower.parameters()):
        return TowerFlops(forward, 0.0)
    if all(weight.requires_grad for weight in tower.parameters()):
        return TowerFlops(forward, 2 * forward)
    with FlopCounterMode(display=False) as counter:
        tower(inputs).sum().backward()
    return TowerFlops(forward, counter.get_total_flops() - forward)


def step_work(config: Config, model: CountedModel, world_size: int, build: Build = build_objective) -> Work:
    """Return the work of one of `world_size` ranks; `build` is as in `ObjectiveQuery`.

    Raises:
        UserError: the batch cannot be divided among the ranks, or the DeepSpeed JSON is invalid.
    """
    rows, micro = config.rank_batch(world_size), config.micro_batch(world_size)
    engine = load_engine_config(config, world_size)
    rules, pieces = ZeroRules.of(engine), rows // micro
    towers = zip((model.image, model.text), model.checkpointed, strict=True)
    image, text = (tower.of_step(pieces, checkpointed, rules.stage) for tower, checkpointed in towers)
    query = ObjectiveQuery(config, world_size, rows, model.dim, resolve_comm_dtype(config, engine), pieces, build)
    objective, calls = objective_work(query), objective_calls(query) if world_size > 1 else []
    return Work(
        tower_flops=rows * (image + text),
        image_share=image / (image + text),
        objective_flops=objective.flops,
        objective_elements=objective.elements,
        updated=model.shapes.total / (world_size if rules.stage else 1),
        hooks=len(model.shapes.sizes) if rules.stage == 3 else 0,
        calls=[*calls, *engine_calls(engine, config.optimizer.name, model.shapes, world_size, pieces)],
        overlaps=rules.bucketed and bool(rules.zero["overlap_comm"]),
        rows=rows,
    )


class SimulatedRank(Communicator):
    """Rank 0 of `world_size` ranks with identical data; `calls` lists its collectives so far, in order."""

    def __init__(self, world_size: int) -> None:
        super().__init__("cpu")
        self.rank, self.world_size = 0, world_size
        self.calls: list[Call] = []

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        self.calls.append(Call(purpose, op, x.numel() * x.element_size()))
        if op == "all_gather":
            result.copy_(torch.cat([x] * self.world_size))
        elif op == "all_reduce":
            result.mul_(self.world_size)
        else:
            result.copy_(x[: len(result)] * self.world_size)
        return Pending(result)


class ObjectiveWork(NamedTuple):
    """The objective's computation on a rank in a step."""

    flops: float  # floating-point operations of matrix products
    elements: float  # elements that all other operations write; memory bandwidth limits these operations


class ObjectiveQuery(NamedTuple):
    """The objective to count, and its size."""

    config: Config
    world_size: int  # K
    rows: int  # rows b per rank, a multiple of micro_batches
    dim: int  # d of the features
    comm_dtype: torch.dtype  # dtype in which features are sent
    micro_batches: int = 1  # number of parts in which features arrive
    build: Build = build_objective  # reference objectives have a different function


def objective_calls(query: ObjectiveQuery) -> list[Call]:
    """Return the objective's collectives in an average step."""
    rows, dims = (2 * query.micro_batches, 4 * query.micro_batches), (_DIM, 2 * _DIM, 3 * _DIM)
    columns, share = (1, 2), prototypes_of(query.config) / query.world_size
    by_size = _lagrange(rows, query.rows), _lagrange(dims, query.dim), _lagrange(columns, share)
    weights = [math.prod(factors) for factors in itertools.product(*by_size)]
    sizes = itertools.product(rows, dims, columns)
    with _at_size_of(query):
        runs = [run_objective(query._replace(rows=r, dim=d), c)[0] for r, d, c in sizes]
    found: Counter[tuple[str, str, int]] = Counter()
    for calls in zip(*runs, strict=True):
        size = sum(weight * call.size for weight, call in zip(weights, calls, strict=True))
        found[calls[0].purpose, calls[0].op, round(size)] += 1
    steps = query.config.objective.amortized.online_every
    return [Call(*call, count / steps) for call, count in found.items()]


def _at_size_of(query: ObjectiveQuery) -> AbstractContextManager[Any]:
    """Let small runs of the objective choose algorithms by the query's batch size instead of their batch size."""
    nets, rows = query.config.objective.amortized, query.rows * query.world_size
    every = amortized.fits_all_rows(nets, query.dim, rows, query.comm_dtype)
    return patch.object(amortized, "fits_all_rows", lambda *_: every)


def _lagrange(points: Sequence[int], x: float) -> list[float]:
    """Return the weights with which a polynomial's values at `points` add up to its value at x."""
    return [math.prod((x - other) / (point - other) for other in points if other != point) for point in points]


def objective_work(query: ObjectiveQuery) -> ObjectiveWork:
    """Return the operations of an average step whose features arrive in one part.

    Both numbers are polynomials in the rows b, width d and this rank's prototypes c, with coefficients from small runs.
    """
    sizes = [(b, d, c) for b in (2, 3, 5) for d in (4, 6, 9) for c in (1, 3)]
    with _at_size_of(query):
        seen = [run_objective(query._replace(rows=b, dim=d, micro_batches=1), c)[1] for b, d, c in sizes]
    terms = torch.tensor([_terms(*size) for size in sizes], dtype=torch.float64)
    coefficients = torch.linalg.lstsq(terms, torch.tensor(seen, dtype=torch.float64)).solution
    share = -(-prototypes_of(query.config) // query.world_size)
    wanted = torch.tensor(_terms(query.rows, query.dim, share), dtype=torch.float64)
    return ObjectiveWork(*(wanted @ coefficients).tolist())


def _terms(b: float, d: float, c: float) -> list[float]:
    """Return the polynomial terms for pairs, networks, features, prototypes, weights and rows."""
    return [b * b * d, b * c * d, b * d * d, b * b, b * d, b * c, c * d, d * d, b, d, c, 1.0]


def run_objective(query: ObjectiveQuery, columns: int = 1) -> tuple[list[Call], ObjectiveWork]:
    """Run steps of the objective with `columns` prototypes per rank; return all collectives and the work per step."""
    config, rows = query.config.model_copy(deep=True), query.rows
    config.objective.npn.prototypes = config.objective.queue.size = columns * query.world_size
    rank = SimulatedRank(query.world_size)
    steps = config.objective.amortized.online_every
    objective = query.build(config, Context(query.dim, rows * (_WARM_UP + steps), rank), query.comm_dtype)
    generator = torch.Generator().manual_seed(0)
    image, text = normalize(torch.randn(2, rows, query.dim, generator=generator), dim=-1)
    valid = torch.ones(rows, dtype=torch.bool)
    elements = _Elements()
    logging.getLogger("neuclip_ds.objectives").setLevel(logging.ERROR)  # misleading warnings about random features
    with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter, elements:
        for number in range(_WARM_UP + steps):
            if number == _WARM_UP:
                rank.calls.clear()
                before, elements.written = counter.get_total_flops(), 0
            index = torch.arange(rows) + number * rows  # new samples, because a queue grows only with new samples
            gather = objective.begin_gather(index, valid)
            if gather is not None:
                for add, whole in ((gather.add_text, text), (gather.add_image, image)):
                    for part in whole.tensor_split(query.micro_batches):
                        add(part)
            objective(Features(image, text, index, valid, gather), Step(number, 0, 1e-3, 1e-3))
    return rank.calls, ObjectiveWork((counter.get_total_flops() - before) / steps, elements.written / steps)


def _addmm_flops(total: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


_IN_PLACE = {torch.ops.aten.addmm_: _addmm_flops}  # operations that torch's counter omits
_BY_ROWS = {torch.ops.aten.index_copy_: 3, torch.ops.aten.index_put_: 2}  # position of the argument that is written
_PRODUCTS = {*flop_registry, *_IN_PLACE}


class _Elements(TorchDispatchMode):
    """Count the elements that operations other than views and matrix products write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in _PRODUCTS:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            # an in-place operation on a list returns nothing; an operation on some rows returns all rows
            if not outputs:
                outputs = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
            elif func.overloadpacket in _BY_ROWS:
                outputs = [args[_BY_ROWS[func.overloadpacket]]]
            self.written += sum(tensor.numel() for tensor in outputs)
        return result


class TrainedShapes(NamedTuple):
    """Numbers of elements of the trained parameters, by optimizer group."""

    groups: tuple[tuple[int, ...], ...]
    adapted: tuple[tuple[int, ...], ...]  # only the groups of matrices, which have a trust ratio in LAMB

    @staticmethod
    def of(module: nn.Module, config: OptimizerConfig) -> TrainedShapes:
        """Count a module's trained parameters."""
        found = [group["params"] for group in parameter_groups(module, config)]
        sizes = [tuple(p.numel() for p in group) for group in found]
        adapted = [size for size, group in zip(sizes, found, strict=True) if group[0].ndim >= 2]
        return TrainedShapes(tuple(sizes), tuple(adapted))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(self.groups))

    @property
    def total(self) -> int:
        return sum(self.sizes)


def engine_calls(
    engine: dict[str, Any], optimizer: str, shapes: TrainedShapes, world_size: int, micro_batches: int = 1
) -> list[Call]:
    """Return DeepSpeed's collectives in a step with `micro_batches` backward passes; one rank has none.

    Splitting a reduction into buckets does not change its total bytes.
    """
    if world_size == 1:
        return []
    rules = ZeroRules.of(engine)
    calls = [
        *_reductions(rules, shapes, world_size, micro_batches),
        *_gathers(rules, shapes, world_size, micro_batches),
        *_norms(rules, shapes, world_size, clips=engine.get("gradient_clipping", 0) > 0),
    ]
    if optimizer == "lamb" and rules.stage:  # squared norms of matrices and updates, once per step on matrices
        steps = optimizer_steps(rules, shapes.adapted, world_size)
        calls += [Call("optimizer", "all_reduce", 2 * _FLOAT * sum(map(len, parts))) for parts in steps]
    return calls


def optimizer_steps(rules: ZeroRules, groups: Sequence[Sequence[int]], world_size: int) -> list[list[Sequence[int]]]:
    """Return the calls of the optimizer's `step` in one update, each with the parts of groups that it updates.

    `groups` lists the number of elements of each parameter by group. ZeRO 3 splits a group where a rank's shards reach
    `sub_group_size` elements.
    """
    if rules.wrapper is Wrapper.ZERO_1_2:
        return [[group] for group in groups]
    if rules.wrapper is not Wrapper.ZERO_3:
        return [list(groups)]
    parts: list[list[Sequence[int]]] = []
    for group in groups:
        start, filled = 0, 0
        for stop, size in enumerate(group, 1):
            filled += -(-size // world_size)
            if filled >= rules.zero["sub_group_size"] or stop == len(group):
                parts.append([group[start:stop]])
                start, filled = stop, 0
    return parts


def _reductions(rules: ZeroRules, shapes: TrainedShapes, world_size: int, micro_batches: int) -> Iterator[Call]:
    """Yield the reductions of all gradients, which fill buckets in the order of the backward pass."""
    op, sizes, passes = "all_reduce", shapes.sizes, 1
    if rules.wrapper is Wrapper.ZERO_3:
        op, sizes = "reduce_scatter", tuple(_round_up(size, world_size) for size in sizes)
    elif rules.wrapper is Wrapper.BF16:
        sizes = tuple(_padded_groups(shapes, world_size))
    if rules.stage > 1:
        passes = micro_batches  # reduces after each pass; lower stages accumulate gradients first
    filled = 0
    for size in reversed(sizes):
        if filled and filled + size > rules.bucket:
            yield Call("gradient reduce", op, rules.sent * filled, passes)
            filled = 0
        filled += size
    yield Call("gradient reduce", op, rules.sent * filled, passes)


def _gathers(rules: ZeroRules, shapes: TrainedShapes, world_size: int, micro_batches: int) -> Iterator[Call]:
    """Yield the gathers of weights: by group after an update, or by parameter in ZeRO 3.

    ZeRO 3 keeps small weights whole and gathers them after the update; it gathers large weights when modules run. With
    one micro-batch, weights stay gathered from the forward to the backward pass, up to `stage3_max_live_parameters`.
    With several micro-batches, ZeRO 3 gathers for the first, the second and the backward pass of each.
    """
    if rules.stage in (1, 2):
        for size in _padded_groups(shapes, world_size):
            yield Call("parameter gather", "all_gather", rules.weight * size // world_size)
    if rules.stage < 3:
        return
    kept = shapes.total <= int(rules.zero["stage3_max_live_parameters"])
    for size in shapes.sizes:
        persistent = size < int(rules.zero["stage3_param_persistence_threshold"])
        times = 1 if persistent else 3 * micro_batches if micro_batches > 1 else 1 if kept else 2
        yield Call("parameter gather", "all_gather", rules.weight * _round_up(size, world_size) // world_size, times)


def _norms(rules: ZeroRules, shapes: TrainedShapes, world_size: int, clips: bool) -> Iterator[Call]:
    """Yield the reductions of the overflow flag and of the gradient norm of each part that the optimizer updates."""
    if rules.checks_overflow:
        yield Call("norm and overflow", "all_reduce", 1)
    if rules.bucketed:
        size = _DOUBLE if rules.wrapper is Wrapper.ZERO_3 and not rules.offloads else _FLOAT
        yield Call("norm and overflow", "all_reduce", size, len(optimizer_steps(rules, shapes.groups, world_size)))
    elif rules.wrapper is Wrapper.NONE and clips:  # only clipping needs the norm
        yield Call("norm and overflow", "all_reduce", _FLOAT)


def _padded_groups(shapes: TrainedShapes, world_size: int) -> Sequence[int]:
    return [_round_up(sum(group), _ALIGNMENT * world_size) for group in shapes.groups]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Network:
    """Network between ranks, in seconds and in bytes per second in one direction."""

    start: float  # time to start a collective of any size
    inner_latency: float  # latency of a message between two ranks of a node
    inner_bandwidth: float  # bandwidth from a rank to the next rank in its node
    latency: float = 0.0  # latency of a message between nodes
    bandwidth: float = math.inf  # bandwidth of all of a node's adapters together
    trees: bool = False  # whether small all-reduces use trees, as in NCCL


@dataclass(frozen=True)
class Compute:
    """Computation rates of one rank, per second."""

    overhead: float  # seconds of a step that the rates below do not explain
    tower_rate: float  # floating-point operations of the towers
    objective_rate: float  # floating-point operations of the objective's matrix products
    element_rate: float  # elements that the objective's other operations write
    update_rate: float  # elements that the optimizer updates
    hook_rate: float  # parameters that ZeRO 3 fetches and releases one by one
    skew: float = 0.0  # time that a rank waits for others, as a fraction of its busy time
    cores: int | None = None  # cores that the ranks of a node share, one per rank if there are enough
    sharing: float = 0.0  # relative slowdown of a core if all cores work at once
    overlaps_engine: bool = False  # whether DeepSpeed's collectives can run during the backward pass
    loading_rate: float = math.inf  # pairs that a rank's loader supplies

    def slowdown(self, ranks_per_node: int) -> float:
        """Return the factor by which all work slows down if ranks outnumber cores."""
        return 1.0 if self.cores is None else max(1.0, ranks_per_node / self.cores)

    def shared(self, ranks_per_node: int) -> float:
        """Return the factor by which work on other cores slows down a rank."""
        if self.cores is None or self.cores == 1:
            return 1.0
        return 1 + self.sharing * (min(ranks_per_node, self.cores) - 1) / (self.cores - 1)


class Cluster(NamedTuple):
    """A number of equal nodes and the network between their ranks."""

    nodes: int
    ranks_per_node: int
    network: Network

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


class StepTime(NamedTuple):
    """Predicted seconds of a step, by part."""

    computation: float  # including all other work that a rank does alone
    communication: float
    exposed: float  # the part of communication that no computation hides
    waiting: float
    loading: float  # wait for the next batch after all other work

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
    """Return the predicted seconds of a step that does this work."""
    slowdown = compute.slowdown(cluster.ranks_per_node)
    shared = slowdown * compute.shared(cluster.ranks_per_node)
    towers = shared * work.tower_flops / compute.tower_rate
    objective = work.objective_flops / compute.objective_rate + work.objective_elements / compute.element_rate
    engine = work.updated / compute.update_rate + work.hooks / compute.hook_rate
    busy = slowdown * compute.overhead + towers + shared * (objective + engine)
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
    return StepTime(busy, sum(by_window.values()), exposed, waiting, loading)


def _window(call: Call) -> tuple[str, float]:
    """Return the computation that can hide a collective, and how many calls it can hide (not the last features)."""
    if call.purpose == "state":
        return "image tower", call.times
    if call.purpose == "features":
        return "image tower", max(0.0, call.times - 1)
    if call.purpose in ("gradient reduce", "parameter gather"):
        return "engine", call.times
    return "nothing", 0.0
