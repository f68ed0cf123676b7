"""The memory that DeepSpeed's engine takes on one rank, by the rules of `engine/zero.py`.

A test holds it to the bytes that engines allocate on two ranks (tests/planning/test_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from neuclip_ds.engine.zero import Wrapper, ZeroRules

_MOMENTS = {"adamw": 2, "lamb": 2, "lion": 1, "sgd": 1}
# float32 copies of what an optimizer updates at once: none in AdamW's fused kernel; torch's others go by single tensors
# on a CPU, by lists on a GPU
_SCRATCH = {"cpu": {"adamw": 0, "lamb": 1, "lion": 1, "sgd": 1}, "cuda": {"adamw": 0, "lamb": 1, "lion": 2, "sgd": 1}}


class Parameters(NamedTuple):
    """Sizes of a module's parameters, in elements."""

    sizes: tuple[int, ...]  # of those that train
    frozen: int  # of all others

    @staticmethod
    def of(module: nn.Module) -> Parameters:
        parameters = list(module.parameters())
        frozen = sum(p.numel() for p in parameters if not p.requires_grad)
        return Parameters(tuple(p.numel() for p in parameters if p.requires_grad), frozen)

    @property
    def trained(self) -> int:
        return sum(self.sizes)

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def below(self, size: int) -> int:
        """Return the elements of all smaller parameters that train."""
        return sum(one for one in self.sizes if one < size)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one rank's device, and on its host where parts are offloaded."""

    weights: int
    gradients: int  # that stay between steps
    growing: int  # gradients that the backward pass makes and the step frees
    optimizer: int  # float32 masters and moments, and the moving average
    working: int  # during forward and backward: buckets, gathered weights
    update: int  # during the last reduction and the optimizer's step
    host: int = 0
    host_update: int = 0


def engine_memory(
    engine: dict[str, Any],
    optimizer: str,
    parameters: Parameters,
    world_size: int,
    device: str,
    accumulates: bool,
    averages: bool = False,
) -> EngineMemory:
    """Return the memory account of an engine, on `cuda` or `cpu`, where untouched pages take no memory.

    Whether a step `accumulates` is whether it has several backward passes; `averages` counts the weights' moving
    average.
    """
    case = _Case(ZeroRules.of(engine), optimizer, parameters, world_size, device, accumulates, averages)
    if case.rules.wrapper is Wrapper.ZERO_3:
        return case.stage3()
    if case.rules.wrapper is Wrapper.ZERO_1_2:
        return case.partitioned()
    return case.flat_gradients() if case.rules.wrapper is Wrapper.BF16 else case.replicated()


class _Case:
    """Quantities that the accounts share."""

    def __init__(
        self,
        rules: ZeroRules,
        optimizer: str,
        parameters: Parameters,
        world_size: int,
        device: str,
        accumulates: bool,
        averages: bool,
    ) -> None:
        self.rules, self.parameters, self.ranks, self.accumulates = rules, parameters, world_size, accumulates
        self.share = -(-parameters.trained // world_size)
        self.states = 4 * (1 + _MOMENTS[optimizer] + averages)  # float32 master, moments and average
        self.bucket = min(rules.bucket, parameters.trained)  # as far as it can be filled
        self.bucket_size = self.bucket if device == "cpu" else rules.bucket
        on_gpu = device == "cuda" and not rules.offloads
        self.scratch = 4 * _SCRATCH["cuda" if on_gpu else "cpu"][optimizer]
        self.by_list = on_gpu or optimizer == "lamb"  # forms all updates before it applies one

    def replicated(self) -> EngineMemory:
        """All parameters on every rank; in bf16 with float32 masters."""
        rules, trained = self.rules, self.parameters.trained
        bf16 = rules.wrapper is Wrapper.UNFUSED
        at_once = trained if self.by_list else self.parameters.largest
        step = self.scratch * at_once + (4 * trained if bf16 else 0)
        return EngineMemory(
            weights=rules.weight * self.parameters.total,
            gradients=0,
            growing=rules.weight * trained,
            optimizer=(self.states if bf16 else self.states - 4) * trained,
            working=0,
            update=max(rules.weight * self.bucket, step),
        )

    def flat_gradients(self) -> EngineMemory:
        """Float32 gradients of all parameters in one buffer; only the optimizer is partitioned."""
        trained = self.parameters.trained
        return EngineMemory(
            weights=2 * self.parameters.total,
            gradients=4 * trained,
            growing=2 * trained,
            optimizer=self.states * self.share,
            working=0,
            update=max(4 * self.bucket, self.scratch * self.share),
        )

    def partitioned(self) -> EngineMemory:
        """Gradients fill a bucket, which is reduced as it is sent and added to the rank's part of the gradients."""
        rules, largest = self.rules, self.parameters.largest
        keeps_all = rules.stage == 1
        flat = rules.weight == 2 and rules.accumulated == 4
        element = rules.accumulated if keeps_all else rules.weight
        cast = (rules.sent + rules.weight) * self.bucket if rules.sent != rules.weight else 0
        working = element * self.bucket_size + cast + rules.weight * largest
        copy = 0 if flat or rules.offloads else rules.accumulated * self.share
        # of gradients that all ranks have, the step keeps the rank's own
        others = rules.accumulated * (self.parameters.trained - self.share) if keeps_all else 0
        common = EngineMemory(
            weights=rules.weight * self.parameters.total,
            gradients=0 if keeps_all else rules.accumulated * self.share,
            growing=rules.accumulated * self.parameters.trained if keeps_all else 0,
            optimizer=self.states * self.share,
            working=working + (copy if self.accumulates else 0),
            update=copy + self.scratch * self.share - others,
        )
        if not rules.offloads:
            return common
        # the masters' gradients, and the updated weights on their way back; both sides keep a buffer for one gradient
        host = (self.states + 4 + rules.weight) * self.share + rules.weight * largest
        return _offloaded(common, host, self.scratch * self.share, common.gradients + rules.weight * largest)

    def stage3(self) -> EngineMemory:
        """Weights gathered where modules run and kept for the backward pass up to `stage3_max_live_parameters`.

        Frozen weights are whole on every rank.
        """
        rules, trained = self.rules, self.parameters.trained
        zero = rules.zero
        live = min(trained, int(zero["stage3_max_live_parameters"]))
        prefetch = min(trained, int(zero["stage3_prefetch_bucket_size"]))
        threshold = int(zero["stage3_param_persistence_threshold"])
        whole = self.parameters.below(threshold) if self.ranks > 1 else 0  # small ones stay whole
        gathered = rules.weight * (live + prefetch) if self.ranks > 1 else 0
        reduced = 2 * rules.sent * self.bucket + rules.weight * self.parameters.largest
        at_once = min(self.share, max(int(zero["sub_group_size"]), -(-self.parameters.largest // self.ranks)))
        common = EngineMemory(
            weights=rules.weight * (self.share + whole + self.parameters.frozen),
            gradients=rules.accumulated * self.share,
            growing=0,
            optimizer=self.states * self.share,
            working=gathered + rules.sent * self.bucket_size + reduced,
            update=rules.sent * self.bucket_size + 4 * at_once + self.scratch * at_once,
        )
        if not rules.offloads:
            return common
        host = (self.states + 4 + rules.accumulated) * self.share
        return _offloaded(common, host, self.scratch * at_once, gradients=0)


def _offloaded(memory: EngineMemory, host: int, update: int, gradients: int) -> EngineMemory:
    """Return an account with the optimizer and its step on the host."""
    return replace(memory, gradients=gradients, optimizer=0, update=0, host=host, host_update=update)
