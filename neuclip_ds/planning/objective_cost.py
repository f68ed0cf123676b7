"""The cost of an objective for a rank at any size: its collectives and its floating-point operations.

Nothing here knows a method. The objective itself runs on a few rows of a `SimulatedRank`, at several sizes, and what it
sends and computes is carried over: the size of a collective is bilinear in rows and width, the operations are a
polynomial of low degree in rows, width and prototypes. So a new method needs no line here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from neuclip_ds.config import Config
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.methods.amorlip import AmortizedConfig
from neuclip_ds.objectives.methods.neuclip import NpnConfig
from neuclip_ds.planning.simulated_rank import Call, SimulatedRank

Build = Callable[[Config, Context, torch.dtype], Objective]
_WARM_UP = 2  # steps; by then NeuCLIP has drawn its prototypes
_DIM = 4


def _addmm_flops(total: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


_IN_PLACE = {torch.ops.aten.addmm_: _addmm_flops}  # which torch's counter leaves out
_BY_ROWS = {torch.ops.aten.index_copy_: 3, torch.ops.aten.index_put_: 2}  # place of what is written
_PRODUCTS = {*flop_registry, *_IN_PLACE}


class ObjectiveWork(NamedTuple):
    """The computation of a rank in a step."""

    flops: float  # of matrix products
    elements: float  # that all other operations write, which memory's speed limits


class _Seen(NamedTuple):
    """Counts of a run of `online_every` steps."""

    calls: list[Call]
    flops: float  # a step
    elements: float  # a step


def objective_calls(
    config: Config,
    world_size: int,
    rows: int,
    dim: int,
    comm_dtype: torch.dtype,
    micro_batches: int = 1,
    build: Build = build_objective,
) -> list[Call]:
    """Return the collectives of an average step.

    Args:
        config: of the run.
        world_size: ranks K.
        rows: b of a rank, a multiple of micro_batches.
        dim: d of the features.
        comm_dtype: precision in which features travel.
        micro_batches: pieces in which they come.
        build: of the objective; a reference of another scheme has its own.
    """
    low_rows, low_dim = 2 * micro_batches, _DIM
    corners = [
        _run(config, world_size, r, d, comm_dtype, micro_batches, build).calls
        for r in (low_rows, 2 * low_rows)
        for d in (low_dim, 2 * low_dim)
    ]
    by_rows, by_dim = rows / low_rows - 1, dim / low_dim - 1
    found: Counter[tuple[str, str, int]] = Counter()
    for low, wide, tall, large in zip(*corners, strict=True):
        both = large.size - wide.size - tall.size + low.size
        size = low.size + by_rows * (tall.size - low.size) + by_dim * (wide.size - low.size) + by_rows * by_dim * both
        found[low.purpose, low.op, round(size)] += 1
    steps = config.objective.section(AmortizedConfig).online_every
    return [Call(*call, count / steps) for call, count in found.items()]


def objective_work(
    config: Config, world_size: int, rows: int, dim: int, comm_dtype: torch.dtype, build: Build = build_objective
) -> ObjectiveWork:
    """Return the operations of an average step; arguments as for `objective_calls`.

    Both numbers are polynomials in rows b, width d and this rank's prototypes c, whose coefficients small runs give.
    """
    sizes = [(b, d, c) for b in (2, 3, 5) for d in (4, 6, 9) for c in (1, 3)]
    seen = [_run(config, world_size, b, d, comm_dtype, 1, build, c) for b, d, c in sizes]
    terms = torch.tensor([_terms(*size) for size in sizes], dtype=torch.float64)
    counts = torch.tensor([[one.flops, one.elements] for one in seen], dtype=torch.float64)
    coefficients = torch.linalg.lstsq(terms, counts).solution
    share = -(-config.objective.section(NpnConfig).prototypes // world_size)
    wanted = torch.tensor(_terms(rows, dim, share), dtype=torch.float64)
    flops, elements = (wanted @ coefficients).tolist()
    return ObjectiveWork(flops, elements)


def _terms(b: float, d: float, c: float) -> list[float]:
    """Return the terms of pairs, networks, features, prototypes and weights, and of their rows."""
    return [b * b * d, b * c * d, b * d * d, b * b, b * d, b * c, c * d, d * d, b, d, c, 1.0]


def _run(
    config: Config,
    world_size: int,
    rows: int,
    dim: int,
    comm_dtype: torch.dtype,
    micro_batches: int,
    build: Build,
    columns: int = 1,
) -> _Seen:
    """Run steps of the objective on `rows` rows and `columns` prototypes a rank."""
    small = config.model_copy(deep=True)
    small.objective.section(NpnConfig).prototypes = columns * world_size
    rank = SimulatedRank(world_size)
    objective = build(small, Context(dim, rows, rank), comm_dtype)
    generator = torch.Generator().manual_seed(0)
    image, text = normalize(torch.randn(2, rows, dim, generator=generator), dim=-1)
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
                _send(gather.add_text, text, micro_batches)
                _send(gather.add_image, image, micro_batches)
            objective(Features(image, text, index, valid, gather), Step(number, 0, 1e-3, 1e-3))
    return _Seen(rank.calls, (counter.get_total_flops() - before) / steps, elements.written / steps)


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


def _send(add: Callable[[torch.Tensor], None], rows: torch.Tensor, pieces: int) -> None:
    parts: Sequence[torch.Tensor] = rows.chunk(pieces)
    for part in parts:
        add(part)
