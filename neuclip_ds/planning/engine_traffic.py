"""What DeepSpeed's engine sends in a step, by the rules of `engine/zero.py`.

Tests hold it to profiled steps of every stage, collective by collective (tests/profiling/test_profile_ranks.py). A
reduction may be split into buckets; its bytes do not depend on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from neuclip_ds.config import OptimizerConfig
from neuclip_ds.engine.optimizers import parameter_groups
from neuclip_ds.engine.zero import Wrapper, ZeroRules
from neuclip_ds.planning.cost_model import Call

_REDUCE, _GATHER, _NORM = "gradient reduce", "parameter gather", "norm and overflow"
_ALIGNMENT = 2  # elements to which a rank's part of a group is rounded up
_FLOAT, _DOUBLE = 4, 8


class TrainedShapes(NamedTuple):
    """Elements of the trained parameters, by group of the optimizer."""

    groups: tuple[tuple[int, ...], ...]
    adapted: tuple[tuple[int, ...], ...]  # of them, those of matrices, which have a trust ratio in LAMB

    @staticmethod
    def of(module: nn.Module, config: OptimizerConfig) -> TrainedShapes:
        """Count a module's trained parameters."""
        found = [group["params"] for group in parameter_groups(module, config)]
        sizes = [tuple(p.numel() for p in group) for group in found]
        adapted = [size for size, group in zip(sizes, found, strict=True) if group[0].ndim >= 2]
        return TrainedShapes(tuple(sizes), tuple(adapted))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.groups))

    @property
    def total(self) -> int:
        return sum(self.sizes)


def engine_calls(
    engine: dict[str, Any], optimizer: str, shapes: TrainedShapes, world_size: int, micro_batches: int = 1
) -> list[Call]:
    """Return the collectives of a step with so many backward passes; none on one rank."""
    if world_size == 1:
        return []
    rules = ZeroRules.of(engine)
    calls = [
        *_reductions(rules, shapes, world_size, micro_batches),
        *_gathers(rules, shapes, world_size, micro_batches),
    ]
    calls += _norms(rules, shapes, world_size, clips=engine.get("gradient_clipping", 0) > 0)
    if optimizer == "lamb" and rules.stage:  # squared norms of matrices and updates, for each step that gets matrices
        steps = rules.optimizer_steps(shapes.adapted, world_size)
        calls += [Call("optimizer", "all_reduce", 2 * _FLOAT * sum(map(len, parts))) for parts in steps]
    return calls


def _reductions(rules: ZeroRules, shapes: TrainedShapes, world_size: int, micro_batches: int) -> Iterator[Call]:
    """Yield gradients of all parameters, filled into buckets in the order of the backward pass."""
    op, sizes, passes = "all_reduce", shapes.sizes, 1
    if rules.wrapper is Wrapper.ZERO_3:
        op, sizes = "reduce_scatter", tuple(_round_up(size, world_size) for size in sizes)
    elif rules.wrapper is Wrapper.BF16:
        sizes = tuple(_padded_groups(shapes, world_size))
    if rules.stage > 1:
        passes = micro_batches  # the gradients of each pass; without, they accumulate first
    filled = 0
    for size in reversed(sizes):
        if filled and filled + size > rules.bucket:
            yield Call(_REDUCE, op, rules.sent * filled, passes)
            filled = 0
        filled += size
    yield Call(_REDUCE, op, rules.sent * filled, passes)


def _gathers(rules: ZeroRules, shapes: TrainedShapes, world_size: int, micro_batches: int) -> Iterator[Call]:
    """Yield weights: of a group after its update, in ZeRO 3 of single parameters.

    ZeRO 3 keeps small weights whole and gathers them after the update, large ones where modules run. One micro-batch
    keeps those of the forward for the backward pass, up to `stage3_max_live_parameters`. Several gather for the first
    pass, the second and the backward pass of each.
    """
    if rules.stage in (1, 2):
        for size in _padded_groups(shapes, world_size):
            yield Call(_GATHER, "all_gather", rules.weight * size // world_size)
    if rules.stage < 3:
        return
    kept = shapes.total <= int(rules.zero["stage3_max_live_parameters"])
    for size in shapes.sizes:
        persistent = size < int(rules.zero["stage3_param_persistence_threshold"])
        times = 1 if persistent else 3 * micro_batches if micro_batches > 1 else 1 if kept else 2
        yield Call(_GATHER, "all_gather", rules.weight * _round_up(size, world_size) // world_size, times)


def _norms(rules: ZeroRules, shapes: TrainedShapes, world_size: int, clips: bool) -> Iterator[Call]:
    """Yield the norm of the gradients, of each part that the optimizer steps on, and the flag of an overflow."""
    if rules.checks_overflow:
        yield Call(_NORM, "all_reduce", 1)
    if rules.bucketed:
        size = _DOUBLE if rules.wrapper is Wrapper.ZERO_3 and not rules.offloads else _FLOAT
        yield Call(_NORM, "all_reduce", size, len(rules.optimizer_steps(shapes.groups, world_size)))
    elif rules.wrapper is Wrapper.NONE and clips:  # nothing else asks for the norm
        yield Call(_NORM, "all_reduce", _FLOAT)


def _padded_groups(shapes: TrainedShapes, world_size: int) -> Sequence[int]:
    return [_round_up(sum(group), _ALIGNMENT * world_size) for group in shapes.groups]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
