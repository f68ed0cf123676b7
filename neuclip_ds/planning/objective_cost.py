"""The cost of an objective for a rank at any size: its collectives and its floating-point operations.

Nothing here knows a method. The objective itself runs on a few rows of a `SimulatedRank`, at several sizes, and what it
sends and computes is carried over: the size of a collective is linear in rows and prototypes and quadratic in width, as
a network's weights are; the operations are a polynomial of low degree in rows, width and prototypes. So a new method
needs no line here.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator, Pending
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.methods.amorlip import AmortizedConfig
from neuclip_ds.objectives.prototypes_config import PrototypesConfig
from neuclip_ds.planning.cost_model import Call

Build = Callable[[Config, Context, torch.dtype], Objective]
_WARM_UP = 2  # steps; by then NeuCLIP has drawn its prototypes
_DIM = 4


def _addmm_flops(total: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


_IN_PLACE = {torch.ops.aten.addmm_: _addmm_flops}  # which torch's counter leaves out
_BY_ROWS = {torch.ops.aten.index_copy_: 3, torch.ops.aten.index_put_: 2}  # place of what is written
_PRODUCTS = {*flop_registry, *_IN_PLACE}


class SimulatedRank(Communicator):
    """Rank 0 of `world_size` ranks that all hold the same numbers.

    Attributes:
        calls: the collectives so far, in order.
    """

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
    """The computation of a rank in a step."""

    flops: float  # of matrix products
    elements: float  # that all other operations write, which memory's speed limits


class ObjectiveQuery(NamedTuple):
    """The objective to count, and at which size."""

    config: Config
    world_size: int  # K
    rows: int  # b of a rank, a multiple of micro_batches
    dim: int  # d of the features
    comm_dtype: torch.dtype  # in which features travel
    micro_batches: int = 1  # pieces in which they come
    build: Build = build_objective  # a reference of another scheme has its own


def prototypes_of(config: Config) -> int:
    """Return the number m of prototypes that the method has; 0 without."""
    return max((section.prototypes for section in _prototype_sections(config)), default=0)


def _prototype_sections(config: Config) -> list[PrototypesConfig]:
    read = find_method(config.objective.method).sections
    return [x for name, x in config.objective if name in read and isinstance(x, PrototypesConfig)]


def objective_calls(query: ObjectiveQuery) -> list[Call]:
    """Return the collectives of an average step."""
    rows, dims = (2 * query.micro_batches, 4 * query.micro_batches), (_DIM, 2 * _DIM, 3 * _DIM)
    columns, share = (1, 2), prototypes_of(query.config) / query.world_size
    by_size = _lagrange(rows, query.rows), _lagrange(dims, query.dim), _lagrange(columns, share)
    weights = [math.prod(factors) for factors in itertools.product(*by_size)]
    runs = [_run(query._replace(rows=r, dim=d), c)[0] for r, d, c in itertools.product(rows, dims, columns)]
    found: Counter[tuple[str, str, int]] = Counter()
    for calls in zip(*runs, strict=True):
        size = sum(weight * call.size for weight, call in zip(weights, calls, strict=True))
        found[calls[0].purpose, calls[0].op, round(size)] += 1
    steps = query.config.objective.section(AmortizedConfig).online_every
    return [Call(*call, count / steps) for call, count in found.items()]


def _lagrange(points: Sequence[int], x: float) -> list[float]:
    """Return the weights of the values at `points` in the value at x of the polynomial through them."""
    return [math.prod((x - other) / (point - other) for other in points if other != point) for point in points]


def objective_work(query: ObjectiveQuery) -> ObjectiveWork:
    """Return the operations of an average step, whose features come in one piece.

    Both numbers are polynomials in rows b, width d and this rank's prototypes c, whose coefficients small runs give.
    """
    sizes = [(b, d, c) for b in (2, 3, 5) for d in (4, 6, 9) for c in (1, 3)]
    seen = [_run(query._replace(rows=b, dim=d, micro_batches=1), c)[1] for b, d, c in sizes]
    terms = torch.tensor([_terms(*size) for size in sizes], dtype=torch.float64)
    coefficients = torch.linalg.lstsq(terms, torch.tensor(seen, dtype=torch.float64)).solution
    share = -(-prototypes_of(query.config) // query.world_size)
    wanted = torch.tensor(_terms(query.rows, query.dim, share), dtype=torch.float64)
    return ObjectiveWork(*(wanted @ coefficients).tolist())


def _terms(b: float, d: float, c: float) -> list[float]:
    """Return the terms of pairs, networks, features, prototypes and weights, and of their rows."""
    return [b * b * d, b * c * d, b * d * d, b * b, b * d, b * c, c * d, d * d, b, d, c, 1.0]


def _run(query: ObjectiveQuery, columns: int = 1) -> tuple[list[Call], ObjectiveWork]:
    """Run steps of the objective with `columns` prototypes a rank; return all their collectives and a step's work."""
    config, rows = query.config.model_copy(deep=True), query.rows
    for section in _prototype_sections(config):
        section.prototypes = columns * query.world_size
    rank = SimulatedRank(query.world_size)
    objective = query.build(config, Context(query.dim, rows, rank), query.comm_dtype)
    generator = torch.Generator().manual_seed(0)
    image, text = normalize(torch.randn(2, rows, query.dim, generator=generator), dim=-1)
    index, valid = torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    steps = config.objective.section(AmortizedConfig).online_every
    elements = _Elements()
    with _muted(), FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter, elements:
        for number in range(_WARM_UP + steps):
            if number == _WARM_UP:
                rank.calls.clear()
                before, elements.written = counter.get_total_flops(), 0
            gather = objective.begin_gather(index, valid)
            if gather is not None:
                for add, whole in ((gather.add_text, text), (gather.add_image, image)):
                    for part in whole.tensor_split(query.micro_batches):
                        add(part)
            objective(Features(image, text, index, valid, gather), Step(number, 0, 1e-3, 1e-3))
    return rank.calls, ObjectiveWork((counter.get_total_flops() - before) / steps, elements.written / steps)


class _Elements(TorchDispatchMode):
    """Counts the elements that operations other than views and matrix products write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in _PRODUCTS:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            # an operation on a list in place returns nothing; one on some rows returns them all
            if not outputs:
                outputs = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
            elif func.overloadpacket in _BY_ROWS:
                outputs = [args[_BY_ROWS[func.overloadpacket]]]
            self.written += sum(tensor.numel() for tensor in outputs)
        return result


@contextmanager
def _muted() -> Iterator[None]:
    """Mute the objective's log, whose warnings about random features would mislead."""
    log = logging.getLogger("neuclip_ds.objectives")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
