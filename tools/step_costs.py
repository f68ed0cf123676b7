"""Count the traffic and operations of one rank's training step without data or other ranks.

There are no formulas for the losses. Instead, a loss runs on a few rows of a `SimulatedRank` at several sizes, and its
traffic and operations are extrapolated. The size of a collective is linear in rows and prototypes and at most quadratic
in width (collectives of a network's weights are quadratic); operations are a low-degree polynomial in rows, width and
prototypes. A new method therefore needs no code here. DeepSpeed's collectives follow `ZeroRules`. Tests check that the
counted collectives are exactly those of profiled steps (tests/profiling/test_profile_ranks.py).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from benchmarking.run_loss import LossBuilder, build_loss
from benchmarking.stored_rows import StoredShape, stored_shapes
from benchmarking.synthetic_profile import prototypes_of
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator, Pending
from neuclip_ds.engine import lean_zero1
from neuclip_ds.engine.config import EngineConfig, load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import parameter_groups
from neuclip_ds.engine.zero import Wrapper
from neuclip_ds.engine.zero_rules import ZeroRules
from neuclip_ds.losses import amorlip
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.stored_features import REFERENCE
from neuclip_ds.models.recompute import checkpointed_blocks
from neuclip_ds.models.towers import Encoder
from neuclip_ds.models.trained_parts import TOWERS, block_names
from neuclip_ds.planning.memory import MemoryQuery

_WARM_UP = 2  # steps; by then NeuCLIP has drawn its prototypes
_DIM = 4  # smallest width d of the small runs
_ALIGNMENT = 2  # DeepSpeed pads a rank's part of a group to a multiple of this many elements
_FLOAT_BYTES = 4
_DOUBLE_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective, and how often a step calls it."""

    purpose: str
    op: str  # as in `ring_bytes`
    size: int  # bytes of a rank's input
    times: float = 1.0  # calls per step, on average


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a rank in a step."""

    tower_flops: float  # of all passes, with recomputation
    image_share: float  # fraction of tower_flops in the image tower
    objective_flops: float
    objective_elements: float
    updated: float  # elements of weights that the optimizer updates
    hooks: int  # number of parameters that ZeRO 3 fetches; 0 in other stages
    calls: Sequence[Call]
    overlaps: bool = False  # whether the engine's config overlaps collectives with the backward pass
    rows: int = 0  # number of pairs that are loaded; 0 without a loader


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """Sizes and operations of the towers, which do not depend on the batch."""

    shapes: TrainedShapes
    dim: int  # d of the features
    image: TowerFlops
    text: TowerFlops
    image_checkpointed: float  # fraction of the image tower's blocks that are recomputed
    text_checkpointed: float


class TowerFlops(NamedTuple):
    """The floating-point operations of a tower on one image or one caption."""

    forward: float
    backward: float  # twice `forward` if all layers train, 0 if none does

    def of_step(self, micro_batches: int, checkpointed: float, stage: int) -> float:
        """Return a step's operations on one input; `checkpointed` is the fraction of blocks that are recomputed."""
        operations = self.forward + self.backward + checkpointed * self.backward / 2
        # with several micro-batches, the forward pass runs again before each backward pass
        if micro_batches > 1 and (self.backward or stage == 3):
            operations += self.forward
        return operations


def count_model(config: Config) -> CountedModel:
    """Count the sizes and operations of the config's model on the meta device.

    Raises:
        UserError: the model's checkpoint, pretrained text encoder or tokenizer cannot be used.
    """
    query = MemoryQuery(config, 1)
    model = query.build()
    checkpointed_fractions = []
    for name in TOWERS:
        tower = model.get_submodule(name)
        checkpointed = checkpointed_blocks(tower, name, config.model.activation_checkpointing)
        checkpointed_fractions.append(len(checkpointed) / max(1, len(list(block_names(tower)))))
    image_checkpointed, text_checkpointed = checkpointed_fractions
    image, text = count_flops(query)
    return CountedModel(
        shapes=TrainedShapes.of(model, config.optimizer),
        dim=query.source.embed_dim,
        image=image,
        text=text,
        image_checkpointed=image_checkpointed,
        text_checkpointed=text_checkpointed,
    )


def count_flops(query: MemoryQuery) -> tuple[TowerFlops, TowerFlops]:
    """Return the operations on one image and on one caption, counting all tokens in all blocks once.

    The count is a property of the model, so that utilizations can be compared: it omits recomputation by activation
    checkpointing, and includes operations that a run avoids because they do not reach the features, such as those on
    patches in the last image block (`model.vision.class_token_only`) and on padding (`model.text.packed`).
    """
    vision = query.config.model.vision.model_copy(update={"class_token_only": False})
    model_config = query.config.model.model_copy(update={"activation_checkpointing": False, "vision": vision})
    query = replace(query, config=query.config.model_copy(update={"model": model_config}))
    model = query.build()
    model.text.packed = False
    size = query.source.preprocessing.size
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


def step_work(
    config: Config,
    model: CountedModel,
    world_size: int,
    build: LossBuilder = build_loss,
    stored_width: int | None = None,
) -> Work:
    """Return the work of one of `world_size` ranks in a step.

    `build` is as in `ObjectiveQuery`. If `stored_width` is given, stored features have this width, and their folders
    are not read.

    Raises:
        UserError: the batch cannot be divided among the ranks, the DeepSpeed JSON is invalid, or a folder of stored
            features cannot be read.
    """
    engine_config = load_engine_config(config, world_size)
    rules = ZeroRules.of(engine_config)
    query = _objective_query(config, engine_config, world_size, model.dim, build, stored_width)
    image_flops = model.image.of_step(query.micro_batches, model.image_checkpointed, rules.stage)
    text_flops = model.text.of_step(query.micro_batches, model.text_checkpointed, rules.stage)
    objective = objective_work(query)
    return Work(
        tower_flops=query.rows * (image_flops + text_flops),
        image_share=image_flops / (image_flops + text_flops),
        objective_flops=objective.flops,
        objective_elements=objective.elements,
        updated=model.shapes.total / (world_size if rules.stage else 1),
        hooks=len(model.shapes.sizes) if rules.stage == 3 else 0,
        calls=step_calls(config, model.shapes, model.dim, world_size, build, stored_width),
        overlaps=rules.overlaps or config.optimizer.lean_zero1,
        rows=query.rows,
    )


def step_calls(
    config: Config,
    shapes: TrainedShapes,
    dim: int,
    world_size: int,
    build: LossBuilder = build_loss,
    stored_width: int | None = None,
) -> list[Call]:
    """Return all collectives of a step; `shapes` and `dim` are as in `CountedModel`, the rest as in `step_work`."""
    engine_config = load_engine_config(config, world_size)
    query = _objective_query(config, engine_config, world_size, dim, build, stored_width)
    calls = objective_calls(query) if world_size > 1 else []
    optimizer = config.optimizer
    return [
        *calls,
        *engine_calls(
            engine_config, optimizer.name, shapes, world_size, query.micro_batches, lean=optimizer.lean_zero1
        ),
    ]


def _objective_query(
    config: Config, engine_config: EngineConfig, world_size: int, dim: int, build: LossBuilder, stored_width: int | None
) -> ObjectiveQuery:
    rows = config.rank_batch(world_size)
    return ObjectiveQuery(
        config=config,
        world_size=world_size,
        rows=rows,
        dim=dim,
        comm_dtype=resolve_comm_dtype(config, engine_config),
        micro_batches=rows // config.micro_batch(world_size),
        build=build,
        stored=stored_shapes(config, stored_width) if build is build_loss else {},
    )


class SimulatedRank(Communicator):
    """Rank 0 of `world_size` ranks with identical data; `calls` lists its collectives so far, in order."""

    def __init__(self, world_size: int) -> None:
        super().__init__("cpu", world_size=world_size)
        self.calls: list[Call] = []

    def _begin(self, op: str, x: Tensor, purpose: str, result: Tensor, launch: Any, *inputs: Tensor) -> Pending:
        self.calls.append(Call(purpose=purpose, op=op, size=x.numel() * x.element_size()))
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


@dataclass(frozen=True, kw_only=True)
class ObjectiveQuery:
    """The objective to count, and its size."""

    config: Config
    world_size: int  # K
    rows: int  # rows b per rank, a multiple of micro_batches
    dim: int  # d of the features
    comm_dtype: torch.dtype  # dtype in which features are sent
    micro_batches: int = 1  # number of parts in which features arrive
    build: LossBuilder = build_loss  # function that builds the loss; baselines have a different one
    stored: Mapping[str, StoredShape] = field(default_factory=dict)  # stored features, by model


def objective_calls(query: ObjectiveQuery) -> list[Call]:
    """Return the objective's collectives in an average step."""
    # sizes of the small runs, which determine a polynomial of degree 1 in rows, 2 in width and 1 in prototypes
    rows = (2 * query.micro_batches, 4 * query.micro_batches)
    dims = (_DIM, 2 * _DIM, 3 * _DIM)
    prototypes = (1, 2)  # per rank
    wanted_prototypes = prototypes_of(query.config) / query.world_size
    weights_by_variable = (
        _lagrange_weights(rows, query.rows),
        _lagrange_weights(dims, query.dim),
        _lagrange_weights(prototypes, wanted_prototypes),
    )
    weights = [math.prod(factors) for factors in itertools.product(*weights_by_variable)]
    calls_by_run = []
    with _batch_size_decides_as_in(query):
        for row_count, dim, prototype_count in itertools.product(rows, dims, prototypes):
            small_run = _SmallRun(replace(query, rows=row_count, dim=dim), prototype_count)
            small_run.run()
            calls_by_run.append(small_run.rank.calls)
    # all runs call the same collectives in the same order, with different sizes
    counts: Counter[tuple[str, str, int]] = Counter()
    for same_call in zip(*calls_by_run, strict=True):
        size = sum(weight * call.size for weight, call in zip(weights, same_call, strict=True))
        counts[same_call[0].purpose, same_call[0].op, round(size)] += 1
    steps = query.config.objective.amortized.online_every
    return [
        Call(purpose=purpose, op=op, size=size, times=count / steps) for (purpose, op, size), count in counts.items()
    ]


def _batch_size_decides_as_in(query: ObjectiveQuery) -> AbstractContextManager[Any]:
    """Let small runs of the objective choose algorithms by the query's batch size instead of their own."""
    options = query.config.objective.amortized
    batch_size = query.rows * query.world_size
    fits_all_rows = amorlip.fits_all_rows(options, query.dim, batch_size, query.comm_dtype)
    return patch.object(amorlip, "fits_all_rows", lambda *_: fits_all_rows)


def _lagrange_weights(points: Sequence[int], x: float) -> list[float]:
    """Return the weights with which a polynomial's values at `points` add up to its value at x."""
    weights = []
    for point in points:
        factors = [(x - other) / (point - other) for other in points if other != point]
        weights.append(math.prod(factors))
    return weights


def objective_work(query: ObjectiveQuery) -> ObjectiveWork:
    """Return the objective's floating-point operations and written elements in an average step with one micro-batch.

    Both numbers are polynomials in the rows b, width d and this rank's prototypes c, with coefficients from small runs.
    """
    sizes = list(itertools.product((2, 3, 5), (4, 6, 9), (1, 3)))  # b, d, c
    works = []
    with _batch_size_decides_as_in(query):
        for rows, dim, prototypes in sizes:
            small_run = _SmallRun(replace(query, rows=rows, dim=dim, micro_batches=1), prototypes)
            elements = _ElementCounter()
            with FlopCounterMode(display=False, custom_mapping=_IN_PLACE_FLOPS) as flops, elements:
                small_run.run()
            works.append((flops.get_total_flops() / small_run.steps, elements.written / small_run.steps))
    terms = torch.tensor([_polynomial_terms(b, d, c) for b, d, c in sizes], dtype=torch.float64)
    coefficients = torch.linalg.lstsq(terms, torch.tensor(works, dtype=torch.float64)).solution
    prototypes = -(-prototypes_of(query.config) // query.world_size)
    wanted = torch.tensor(_polynomial_terms(query.rows, query.dim, prototypes), dtype=torch.float64)
    return ObjectiveWork(*(wanted @ coefficients).tolist())


def _polynomial_terms(b: float, d: float, c: float) -> list[float]:
    """Return the terms of the polynomial in the rows b, width d and prototypes c."""
    return [b * b * d, b * c * d, b * d * d, b * b, b * d, b * c, c * d, d * d, b, d, c, 1.0]


class _SmallRun:
    """Steps of the loss on a few rows of rank 0, after the warm-up.

    Attributes:
        rank: the simulated rank, whose `calls` are those since the warm-up.
        steps: number of steps that `run` takes.
    """

    def __init__(self, query: ObjectiveQuery, prototypes: int) -> None:
        """Build the loss with `prototypes` per rank, and run the warm-up."""
        config = query.config.model_copy(deep=True)
        config.objective.npn.prototypes = prototypes * query.world_size
        config.objective.queue.size = prototypes * query.world_size
        self.steps = config.objective.amortized.online_every
        self.rank = SimulatedRank(query.world_size)
        samples = query.rows * (_WARM_UP + self.steps)
        self._loss = query.build(config, query.dim, samples, self.rank, query.comm_dtype)
        self._micro_batches = query.micro_batches
        generator = torch.Generator().manual_seed(0)
        image, text = normalize(torch.randn(2, query.rows, query.dim, generator=generator), dim=-1)
        self._stored = {name: shape.random_rows(query.rows, generator).pair() for name, shape in query.stored.items()}
        self._image = image.requires_grad_()
        self._text = text.requires_grad_()
        for number in range(_WARM_UP):
            self._step(number)
        self.rank.calls.clear()

    def run(self) -> None:
        for number in range(_WARM_UP, _WARM_UP + self.steps):
            self._step(number)

    def _step(self, number: int) -> None:
        rows = len(self._image)
        index = torch.arange(rows) + number * rows  # new samples, because a queue grows only with new samples
        valid = torch.ones(rows, dtype=torch.bool)
        position = Position(step=number, lr=1e-3, peak_lr=1e-3)
        if self._stored:
            assert isinstance(self._loss, ContrastiveLoss)  # baselines have no form with stored features
            teachers = [rows for name, rows in self._stored.items() if name != REFERENCE]
            pending = self._loss.begin(index, valid, position, reference=self._stored.get(REFERENCE), teacher=teachers)
        else:
            pending = self._loss.begin(index, valid, position)
        # add the features of each micro-batch, as the engine does
        texts = self._text.tensor_split(self._micro_batches)
        images = self._image.tensor_split(self._micro_batches)
        for number_of_micro_batch, (text, image) in enumerate(zip(texts, images, strict=True)):
            pending.add_text(text)
            pending.add_image(image)
            if number_of_micro_batch == 0:
                pending.begin_reads()
        self._loss(self._image, self._text, pending=pending)


def _addmm_flops(total: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


_IN_PLACE_FLOPS = {torch.ops.aten.addmm_: _addmm_flops}  # operations that torch's counter omits
_MATRIX_PRODUCTS = {*flop_registry, *_IN_PLACE_FLOPS}
# operations that return all rows but write only some, and the position of the argument that is written
_WRITTEN_ARGUMENT = {torch.ops.aten.index_copy_: 3, torch.ops.aten.index_put_: 2}


class _ElementCounter(TorchDispatchMode):
    """Counts the elements that operations other than views and matrix products write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket in _MATRIX_PRODUCTS:
            return result
        outputs = _tensors_in(result)
        if not outputs:  # an in-place operation on a list returns nothing
            outputs = _tensors_in(args[:1])
        elif func.overloadpacket in _WRITTEN_ARGUMENT:
            outputs = [args[_WRITTEN_ARGUMENT[func.overloadpacket]]]
        self.written += sum(tensor.numel() for tensor in outputs)
        return result


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class TrainedShapes(NamedTuple):
    """Numbers of elements of the trained parameters, by optimizer group."""

    groups: tuple[tuple[int, ...], ...]
    adapted: tuple[tuple[int, ...], ...]  # only the groups of matrices, which have a trust ratio in LAMB

    @staticmethod
    def of(module: nn.Module, config: OptimizerConfig) -> TrainedShapes:
        """Count a module's trained parameters."""
        groups = []
        adapted = []
        for group in parameter_groups(module, config):
            sizes = tuple(parameter.numel() for parameter in group["params"])
            groups.append(sizes)
            if group["params"][0].ndim >= 2:
                adapted.append(sizes)
        return TrainedShapes(tuple(groups), tuple(adapted))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(self.groups))

    @property
    def total(self) -> int:
        return sum(self.sizes)


def engine_calls(
    engine_config: EngineConfig,
    optimizer: str,
    shapes: TrainedShapes,
    world_size: int,
    micro_batches: int = 1,
    lean: bool = False,
) -> list[Call]:
    """Return the engine's collectives in a step with `micro_batches` backward passes; a single rank has none.

    `lean` is `optimizer.lean_zero1`. Splitting a reduction into buckets does not change its total bytes.
    """
    if world_size == 1:
        return []
    rules = ZeroRules.of(engine_config)
    if lean:
        reductions = _lean_reductions(shapes, world_size)
        norms: Iterable[Call] = [Call(purpose="norm and overflow", op="all_reduce", size=_FLOAT_BYTES)]
    else:
        reductions = _reductions(rules, shapes, world_size, micro_batches)
        norms = _norms(rules, shapes, world_size, clips=engine_config.options.gradient_clipping > 0)
    calls = [*reductions, *_gathers(rules, shapes, world_size, micro_batches), *norms]
    if optimizer == "lamb" and rules.stage:  # squared norms of matrices and updates, once per `step` on matrices
        for parts in optimizer_steps(rules, shapes.adapted, world_size):
            matrices = sum(map(len, parts))
            calls.append(Call(purpose="optimizer", op="all_reduce", size=2 * _FLOAT_BYTES * matrices))
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
        start = 0
        shard_elements = 0
        for stop, size in enumerate(group, 1):
            shard_elements += -(-size // world_size)
            if shard_elements >= rules.zero.sub_group_size or stop == len(group):
                parts.append([group[start:stop]])
                start = stop
                shard_elements = 0
    return parts


def _reductions(rules: ZeroRules, shapes: TrainedShapes, world_size: int, micro_batches: int) -> Iterator[Call]:
    """Yield the reductions of all gradients, which fill buckets in the order of the backward pass."""
    op = "all_reduce"
    sizes = shapes.sizes
    if rules.wrapper is Wrapper.ZERO_3:
        op = "reduce_scatter"
        sizes = tuple(_round_up(size, world_size) for size in sizes)
    elif rules.wrapper is Wrapper.BF16:
        sizes = tuple(_padded_groups(shapes, world_size))
    # ZeRO 2 and 3 reduce after each pass; lower stages accumulate gradients first
    times = micro_batches if rules.stage > 1 else 1
    bucket_elements = 0
    for size in reversed(sizes):
        if bucket_elements and bucket_elements + size > rules.bucket:
            yield Call(purpose="gradient reduce", op=op, size=rules.sent * bucket_elements, times=times)
            bucket_elements = 0
        bucket_elements += size
    yield Call(purpose="gradient reduce", op=op, size=rules.sent * bucket_elements, times=times)


def _lean_reductions(shapes: TrainedShapes, world_size: int) -> Iterator[Call]:
    """Yield the reductions of `LeanZero1`, once per step whatever the number of micro-batches.

    A group of at most one bucket is reduced and scattered as a whole; each bucket of a larger group is reduced to the
    ranks whose shards contain its elements.
    """
    padded_sizes = _padded_groups(shapes, world_size)
    for group, padded in zip(shapes.groups, padded_sizes, strict=True):
        if padded <= lean_zero1.BUCKET_ELEMENTS:
            yield Call(purpose="gradient reduce", op="reduce_scatter", size=_FLOAT_BYTES * padded)
            continue
        shard = padded // world_size
        for start, stop in _lean_buckets(group):
            while start < stop:
                end_of_shard = (start // shard + 1) * shard
                part_stop = min(stop, end_of_shard)
                yield Call(purpose="gradient reduce", op="reduce", size=_FLOAT_BYTES * (part_stop - start))
                start = part_stop


def _lean_buckets(group: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the element range [start, stop) of each gradient bucket in a parameter group."""
    start = 0
    stop = 0
    for size in group:
        stop += size
        if stop - start >= lean_zero1.BUCKET_ELEMENTS:
            yield start, stop
            start = stop
    if start < stop:
        yield start, stop


def _gathers(rules: ZeroRules, shapes: TrainedShapes, world_size: int, micro_batches: int) -> Iterator[Call]:
    """Yield the all-gathers of weights: by group after an update, or by parameter in ZeRO 3.

    ZeRO 3 does not partition small weights (`stage3_param_persistence_threshold`) during a step, and gathers them after
    the update; it gathers large weights when modules run. With one micro-batch, weights stay gathered from the forward
    to the backward pass if at most `stage3_max_live_parameters` parameters are trained. With several micro-batches,
    ZeRO 3 gathers large weights three times per micro-batch: for the first forward pass, the second forward pass and
    the backward pass.
    """
    if rules.stage in (1, 2):
        for size in _padded_groups(shapes, world_size):
            yield Call(purpose="parameter gather", op="all_gather", size=rules.weight * size // world_size)
    if rules.stage < 3:
        return
    if micro_batches > 1:
        times_of_large = 3 * micro_batches
    elif shapes.total <= rules.zero.stage3_max_live_parameters:
        times_of_large = 1
    else:
        times_of_large = 2
    for size in shapes.sizes:
        is_small = size < rules.zero.stage3_param_persistence_threshold
        shard = rules.weight * _round_up(size, world_size) // world_size
        times = 1 if is_small else times_of_large
        yield Call(purpose="parameter gather", op="all_gather", size=shard, times=times)


def _norms(rules: ZeroRules, shapes: TrainedShapes, world_size: int, clips: bool) -> Iterator[Call]:
    """Yield the reductions of the overflow flag and of the gradient norm of each part that the optimizer updates."""
    if rules.checks_overflow:
        yield Call(purpose="norm and overflow", op="all_reduce", size=1)
    if rules.bucketed:
        is_double = rules.wrapper is Wrapper.ZERO_3 and not rules.offloads
        size = _DOUBLE_BYTES if is_double else _FLOAT_BYTES
        steps = optimizer_steps(rules, shapes.groups, world_size)
        yield Call(purpose="norm and overflow", op="all_reduce", size=size, times=len(steps))
    elif rules.wrapper is Wrapper.NONE and clips:  # only clipping needs the norm
        yield Call(purpose="norm and overflow", op="all_reduce", size=_FLOAT_BYTES)


def _padded_groups(shapes: TrainedShapes, world_size: int) -> Sequence[int]:
    return [_round_up(sum(group), _ALIGNMENT * world_size) for group in shapes.groups]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
