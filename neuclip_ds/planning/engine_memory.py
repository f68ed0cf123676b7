"""What DeepSpeed's engine holds on one rank, by ZeRO stage.

The rules were read off DeepSpeed 0.19.8 and checked against the bytes that its engine allocates on one and two ranks
(tests/planning/test_memory.py). N parameters, T of them trained, K ranks, e bytes a weight, R elements of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from neuclip_ds.engine.config import is_bf16, zero_stage

_MOMENTS = {"adamw": 2, "lamb": 2, "lion": 1, "sgd": 1}
# float32 copies of what an optimizer updates at once: torch goes by single tensors on a CPU, by lists on a GPU
_SCRATCH = {"cpu": {"adamw": 2, "lamb": 1, "lion": 1, "sgd": 1}, "cuda": {"adamw": 1, "lamb": 1, "lion": 2, "sgd": 1}}
_ALLREDUCE = 500_000_000  # elements of stage 0's and of the bf16 optimizer's bucket, which no option sets
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}


class Parameters(NamedTuple):
    """Elements of a module's parameters."""

    sizes: tuple[int, ...]
    trained: int

    @staticmethod
    def of(module: nn.Module) -> Parameters:
        parameters = list(module.parameters())
        return Parameters(tuple(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad))

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def below(self, size: int) -> int:
        """Elements of all parameters that are smaller."""
        return sum(one for one in self.sizes if one < size)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one rank's device; `host` is what offload moves off it."""

    weights: int
    gradients: int  # those that are always there, or grow to their size in the first backward pass
    growing: int  # gradients in the weights' precision, from where the backward pass makes them to the step
    optimizer: int  # float32 masters and moments
    working: int  # during forward and backward: buckets, gathered weights
    update: int  # during the last reduction and the optimizer's step
    host: int = 0
    host_update: int = 0


def engine_memory(
    engine: dict[str, Any], optimizer: str, parameters: Parameters, world_size: int, device: str, accumulates: bool
) -> EngineMemory:
    """The account of an engine.

    Args:
        engine: DeepSpeed's config.
        optimizer: its name.
        parameters: of the module.
        world_size: ranks over which ZeRO partitions.
        device: `cuda` or `cpu`, where pages that nobody touches take no memory.
        accumulates: whether a step has several backward passes.
    """
    case = _Case(engine, optimizer, parameters, world_size, device, accumulates)
    return (case.replicated, case.flat_gradients, case.partitioned, case.stage3)[case.kind]()


class _Case:
    """The quantities that the rules share."""

    def __init__(
        self,
        engine: dict[str, Any],
        optimizer: str,
        parameters: Parameters,
        world_size: int,
        device: str,
        accumulates: bool,
    ) -> None:
        zero = {**_DEFAULTS, **engine.get("zero_optimization", {})}
        self.stage = zero_stage(engine)
        self.offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        self.weight = 2 if is_bf16(engine) else 4
        self.accumulated = 4 if engine.get("data_types", {}).get("grad_accum_dtype") == "fp32" else self.weight
        self.sent = 4 if engine.get("communication_data_type") == "fp32" else self.weight
        self.parameters, self.ranks = parameters, world_size
        self.share = -(-parameters.trained // world_size)
        self.states = 4 * (1 + _MOMENTS[optimizer])  # float32 master and moments
        self.bucket = min(int(zero["reduce_bucket_size"]), parameters.trained)  # as far as it can be filled
        self.bucket_size = self.bucket if device == "cpu" else int(zero["reduce_bucket_size"])
        self.on_gpu = device == "cuda" and not self.offloads
        self.scratch = 4 * _SCRATCH["cuda" if self.on_gpu else "cpu"][optimizer]
        self.by_list = self.on_gpu or optimizer == "lamb"  # which forms all updates before it applies one
        self.accumulates = accumulates
        self.group = int(zero["sub_group_size"])
        self.live = min(parameters.total, int(zero["stage3_max_live_parameters"]))
        self.whole = parameters.below(int(zero["stage3_param_persistence_threshold"])) if world_size > 1 else 0
        self.prefetch = min(parameters.total, int(zero["stage3_prefetch_bucket_size"]))

    @property
    def kind(self) -> int:
        """DeepSpeed's class: 0 none or its 16-bit one, 1 BF16_Optimizer, 2 ZeRO 1 and 2, 3 ZeRO 3."""
        if self.stage != 1:
            return self.stage
        return 1 if self.weight == 2 and self.accumulated == 4 and not self.offloads else 2

    def replicated(self) -> EngineMemory:
        trained, bf16 = self.parameters.trained, self.weight == 2
        at_once = trained if self.by_list else self.parameters.largest
        step = self.scratch * at_once + (4 * trained if bf16 else 0)
        return EngineMemory(
            weights=self.weight * self.parameters.total,
            gradients=0,
            growing=self.weight * trained,
            optimizer=(self.states if bf16 else self.states - 4) * trained,
            working=0,
            update=max(self.weight * min(trained, _ALLREDUCE), step),
        )

    def flat_gradients(self) -> EngineMemory:
        """Stage 1 in bf16: float32 gradients of all parameters lie in one buffer, only the optimizer is partitioned."""
        trained = self.parameters.trained
        return EngineMemory(
            weights=2 * self.parameters.total,
            gradients=4 * trained,
            growing=2 * trained,
            optimizer=self.states * self.share,
            working=0,
            update=max(4 * min(trained, _ALLREDUCE), self.scratch * self.share),
        )

    def partitioned(self) -> EngineMemory:
        """A bucket is filled, reduced in the sent precision, and added to the rank's part of the gradients."""
        keeps_all = self.stage == 1
        flat = self.weight == 2 and self.accumulated == 4
        element = self.accumulated if keeps_all else self.weight
        cast = (self.sent + self.weight) * self.bucket if self.sent != self.weight else 0
        working = element * self.bucket_size + cast + self.weight * self.parameters.largest
        copy = 0 if flat or self.offloads else self.accumulated * self.share
        # of gradients that all ranks have, the step keeps the rank's own
        others = self.accumulated * (self.parameters.trained - self.share) if keeps_all else 0
        common = EngineMemory(
            weights=self.weight * self.parameters.total,
            gradients=0 if keeps_all else self.accumulated * self.share,
            growing=self.accumulated * self.parameters.trained if keeps_all else 0,
            optimizer=self.states * self.share,
            working=working + (copy if self.accumulates else 0),
            update=copy + self.scratch * self.share - others,
        )
        if not self.offloads:
            return common
        # the masters' gradients, and the updated weights on their way back
        host = (self.states + 4 + self.weight) * self.share + self.weight * self.parameters.largest
        return _offloaded(common, host, self.scratch * self.share, self.weight * self.parameters.largest)

    def stage3(self) -> EngineMemory:
        """Weights are gathered where modules run and kept for the backward pass up to `stage3_max_live_parameters`."""
        gathered = self.weight * (self.live + self.prefetch) if self.ranks > 1 else 0
        reduced = 2 * self.sent * self.bucket + self.weight * self.parameters.largest
        at_once = min(self.share, max(self.group, -(-self.parameters.largest // self.ranks)))
        common = EngineMemory(
            weights=self.weight * (-(-self.parameters.total // self.ranks) + self.whole),  # small ones stay whole
            gradients=self.accumulated * self.share,
            growing=0,
            optimizer=self.states * self.share,
            working=gathered + self.sent * self.bucket_size + reduced,
            update=self.sent * self.bucket_size + 4 * at_once + self.scratch * at_once,
        )
        if not self.offloads:
            return common
        host = (self.states + 4 + self.accumulated) * self.share
        return _offloaded(common, host, self.scratch * at_once, 0, gradients=0)


def _offloaded(memory: EngineMemory, host: int, update: int, staged: int, gradients: int | None = None) -> EngineMemory:
    """The optimizer and its step on the host, `staged` bytes more on the device."""
    return EngineMemory(
        weights=memory.weights,
        gradients=memory.gradients if gradients is None else gradients,
        growing=memory.growing,
        optimizer=0,
        working=memory.working + staged,
        update=staged,
        host=host,
        host_update=update,
    )
