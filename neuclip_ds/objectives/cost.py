"""What an objective costs a rank at any size: its collectives and its floating-point operations.

Nothing here knows a method. The objective itself runs on a few rows of a `SimulatedRank`, at several sizes, and what it
sends and multiplies is carried over: the size of a collective is bilinear in rows and width, operations are a sum of
three terms of known degree. So a method that is added to the table needs no line here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from neuclip_ds.config import Config
from neuclip_ds.distributed.simulated import Call, SimulatedRank
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.gather import Features

Build = Callable[[Config, Context, torch.dtype], Objective]
_WARM_UP = 2  # steps; by then NeuCLIP has drawn its prototypes
_DIM = 4


def _addmm_flops(total: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


_IN_PLACE = {torch.ops.aten.addmm_: _addmm_flops}  # which torch's counter leaves out


class ObjectiveFlops(NamedTuple):
    """Floating-point operations of matrix products, per rank and step."""

    pairs: float  # of own rows with all rows: b B d
    networks: float  # of all rows with this rank's share of a network: B m/K d, or B d^2

    @property
    def total(self) -> float:
        return self.pairs + self.networks


class _Seen(NamedTuple):
    """What a run of `online_every` steps has shown."""

    calls: list[Call]
    flops: float  # a step


def objective_calls(
    config: Config,
    world_size: int,
    rows: int,
    dim: int,
    wire: torch.dtype,
    micro_batches: int = 1,
    build: Build = build_objective,
) -> list[Call]:
    """The collectives of an average step.

    Args:
        config: of the run.
        world_size: ranks K.
        rows: b of a rank, a multiple of micro_batches.
        dim: d of the features.
        wire: precision in which features travel.
        micro_batches: pieces in which they come.
        build: of the objective; a reference of another scheme has its own.
    """
    low_rows, low_dim = 2 * micro_batches, _DIM
    corners = [
        _run(config, world_size, r, d, wire, micro_batches, build).calls
        for r in (low_rows, 2 * low_rows)
        for d in (low_dim, 2 * low_dim)
    ]
    by_rows, by_dim = rows / low_rows - 1, dim / low_dim - 1
    found: Counter[tuple[str, str, int]] = Counter()
    for low, wide, tall, large in zip(*corners, strict=True):
        both = large.size - wide.size - tall.size + low.size
        size = low.size + by_rows * (tall.size - low.size) + by_dim * (wide.size - low.size) + by_rows * by_dim * both
        found[low.purpose, low.op, round(size)] += 1
    steps = config.objective.amortized.online_every
    return [Call(*call, count / steps) for call, count in found.items()]


def objective_flops(
    config: Config, world_size: int, rows: int, dim: int, wire: torch.dtype, build: Build = build_objective
) -> ObjectiveFlops:
    """Operations of an average step; arguments as for `objective_calls`."""
    small, tall, wide, more = (
        _run(config, world_size, r, d, wire, 1, build, columns).flops
        for r, d, columns in ((2, _DIM, 1), (4, _DIM, 1), (2, 2 * _DIM, 1), (2, _DIM, 2))
    )
    pairs = (tall - 2 * small) / 2  # b B d grows fourfold with the rows, all others twofold
    square = (wide - 2 * small) / 2  # B d^2 likewise with the width
    column = more - small  # B d of one prototype; what is left is B d of the positives
    by_rows, by_dim = rows / 2, dim / _DIM
    share = -(-config.objective.npn.prototypes // world_size)
    return ObjectiveFlops(
        pairs=pairs * by_rows**2 * by_dim,
        networks=by_rows * (column * by_dim * share + square * by_dim**2),
    )


def _run(
    config: Config,
    world_size: int,
    rows: int,
    dim: int,
    wire: torch.dtype,
    micro_batches: int,
    build: Build,
    columns: int = 1,
) -> _Seen:
    """Steps of the objective on `rows` rows a rank, with `columns` prototypes a rank."""
    small = config.model_copy(deep=True)
    small.objective.npn.prototypes = columns * world_size
    rank = SimulatedRank(world_size)
    objective = build(small, Context(dim, rows, rank), wire)
    generator = torch.Generator().manual_seed(0)
    image, text = normalize(torch.randn(2, rows, dim, generator=generator), dim=-1)
    index, valid = torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    steps = config.objective.amortized.online_every
    with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter, _unheard():
        for number in range(_WARM_UP + steps):
            if number == _WARM_UP:
                rank.calls.clear()
                before = counter.get_total_flops()
            gather = objective.begin(index, valid)
            if gather is not None:
                _send(gather.add_text, text, micro_batches)
                _send(gather.add_image, image, micro_batches)
            objective(Features(image, text, index, valid, gather), Step(number, 0, 1e-3, 1e-3))
    return _Seen(rank.calls, (counter.get_total_flops() - before) / steps)


@contextmanager
def _unheard() -> Iterator[None]:
    """Without the log of the objective, whose warnings about noise would mislead."""
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
