"""What DeepSpeed's engine sends in a step, by ZeRO stage.

The rules were read off DeepSpeed 0.19.8 and off profiled steps in every stage, to which a test holds them, byte by byte
(tests/profiling/test_profile_ranks.py). A collective may be split into buckets; its bytes do not depend on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from neuclip_ds.engine.config import is_bf16, zero_stage
from neuclip_ds.engine.optimizers import parameter_groups
from neuclip_ds.planning.simulated_rank import Call

_REDUCE, _GATHER, _NORM = "gradient reduce", "parameter gather", "norm and overflow"
_ALIGNMENT = 2  # elements to which a rank's part of a group is rounded up
_ALL_REDUCE = 500_000_000  # elements of a bucket without ZeRO and in bf16's ZeRO 1, which no option sets
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
# (stage, bf16) -> calls and bytes of each reduction of norms and overflow flags
_NORMS: dict[tuple[int, bool], Sequence[tuple[int, int]]] = {
    (0, False): [(1, 4)],
    (0, True): [],
    (1, False): [(2, 4)],
    (1, True): [],
    (2, False): [(2, 4)],
    (2, True): [(1, 1), (2, 4)],
    (3, False): [(2, 8)],
    (3, True): [(2, 8)],
}


class TrainedShapes(NamedTuple):
    """Elements of the trained parameters, by group of the optimizer."""

    groups: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(module: nn.Module) -> TrainedShapes:
        groups = parameter_groups(module, weight_decay=0.0)
        return TrainedShapes(tuple(tuple(p.numel() for p in group["params"]) for group in groups))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for group in self.groups for size in group)

    @property
    def total(self) -> int:
        return sum(self.sizes)


def engine_calls(engine: dict[str, Any], shapes: TrainedShapes, world_size: int, micro_batches: int = 1) -> list[Call]:
    """The collectives of a step; none on one rank.

    Args:
        engine: DeepSpeed's config.
        shapes: of the module's trained parameters.
        world_size: ranks.
        micro_batches: backward passes of a step.
    """
    if world_size == 1:
        return []
    stage, bf16 = zero_stage(engine), is_bf16(engine)
    weight = 2 if bf16 else 4
    sent = {"fp32": 4, "bf16": 2}.get(engine.get("communication_data_type", ""), weight)
    zero = {**_DEFAULTS, **engine.get("zero_optimization", {})}
    bucket = int(zero["reduce_bucket_size"])
    norms = [Call(_NORM, "all_reduce", size, count) for count, size in _NORMS[stage, bf16]]
    if stage == 0:
        clips = engine.get("gradient_clipping", 0) > 0  # what else would ask for the norm
        return [*_buckets("all_reduce", shapes.sizes, sent, _ALL_REDUCE, 1), *(norms if clips else [])]
    if stage == 3:
        padded = [_up(size, world_size) for size in shapes.sizes]
        reduced = _buckets("reduce_scatter", padded, sent, bucket, micro_batches)
        return [*reduced, *_weights_of_stage_3(zero, shapes, world_size, weight, micro_batches), *norms]
    one_buffer = stage == 1 and bf16 and engine.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    passes = 1 if stage == 1 else micro_batches  # stage 2 reduces the gradients of each pass
    padded = [_up(sum(group), _ALIGNMENT * world_size) for group in shapes.groups]
    if one_buffer:
        reduced = _buckets("all_reduce", padded, sent, _ALL_REDUCE, 1)
    else:
        reduced = _buckets("all_reduce", shapes.sizes, sent, bucket, passes)
    shares = [size // world_size for size in padded]
    return [*reduced, *(Call(_GATHER, "all_gather", weight * share) for share in shares), *norms]


def _weights_of_stage_3(
    zero: dict[str, Any], shapes: TrainedShapes, world_size: int, weight: int, micro_batches: int
) -> Iterable[Call]:
    """Small weights stay whole and are gathered after the update; large ones where modules run.

    One micro-batch keeps those of the forward for the backward pass, up to `stage3_max_live_parameters`. Several
    gather for the first pass, the second and the backward pass of each.
    """
    kept = shapes.total <= int(zero["stage3_max_live_parameters"])
    for size in shapes.sizes:
        persistent = size < int(zero["stage3_param_persistence_threshold"])
        times = 1 if persistent else 3 * micro_batches if micro_batches > 1 else 1 if kept else 2
        yield Call(_GATHER, "all_gather", weight * _up(size, world_size) // world_size, times)


def _buckets(op: str, sizes: Sequence[int], item: int, bucket: int, passes: int) -> Iterable[Call]:
    """Gradients of all parameters, filled into buckets in the order of the backward pass."""
    filled = 0
    for size in reversed(sizes):
        if filled and filled + size > bucket:
            yield Call(_REDUCE, op, item * filled, passes)
            filled = 0
        filled += size
    yield Call(_REDUCE, op, item * filled, passes)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
