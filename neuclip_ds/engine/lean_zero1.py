"""A ZeRO 1 step in bf16 that computes the same weights as DeepSpeed's step, with fewer kernels and copies.

DeepSpeed casts and adds each parameter's gradient separately, copies all gradients into another buffer and back to
all-reduce them, launches one norm per parameter, and fills the buffers with zeros after the step. `LeanZero1` copies
the gradients to DeepSpeed's float32 buffers with one call per bucket, sums each gradient on the rank that stores its
master weight, and reads only the norm of this rank's shards. Master weights, moments and their layout are DeepSpeed's.
On several ranks, clipped updates may differ by rounding, because the norm is summed in a different order; on more than
two ranks, so may the sums of gradients.

On one rank, the parameters of a group form one bucket. On several ranks, a group of more than 25 MiB is split into
buckets of at least 25 MiB (except for the last one), which are summed during the last backward pass of a step (in the
first step, after this pass). DeepSpeed stores a rank's shard as one contiguous part of a group, so a bucket is not
scattered over all ranks: each of its parts is reduced to the rank whose shard contains that part. A smaller group is
summed with one reduce-scatter. All ranks start these collectives in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from neuclip_ds.distributed.communicator import Communicator, Pending

BUCKET_ELEMENTS = 6_553_600  # 25 MiB in float32, DDP's default
_CLIP_EPS = 1e-6  # added to the norm in the denominator, as in DeepSpeed


@dataclass(frozen=True, kw_only=True)
class _Reduction:
    """The sum over all ranks of a part of a gradient buffer."""

    part: Tensor  # elements of the buffer: those that `owner` stores, or all
    owner: int | None  # rank that receives the sum in `part`; None: each rank receives its shard
    shard: Tensor  # this rank's shard of the buffer

    def begin(self, communicator: Communicator) -> Pending:
        """Start the sum, which overlaps computation."""
        if self.owner is None:
            return communicator.begin_reduce_scatter(self.part, "gradient reduce")
        return communicator.begin_reduce(self.part, self.owner, "gradient reduce")

    def finish(self, pending: Pending) -> None:
        """Wait for the sum, which is then in the shard of the rank that stores it."""
        result = pending.wait()
        if self.owner is None:
            self.shard.copy_(result)


class _Bucket:
    """Consecutive parameters of a group, whose gradients are added and summed over ranks together.

    Attributes:
        parameters: the parameters.
        reductions: the sums over ranks, in the order in which they start.
        missing: number of gradients that the current backward pass has not computed yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], part: Tensor, reductions: Sequence[_Reduction]) -> None:
        """
        Args:
            parameters: the parameters.
            part: the part of the group's float32 gradient buffer that stores their gradients, possibly with padding.
            reductions: the sums over ranks, in the order in which they start.
        """
        self.parameters = parameters
        self.reductions = reductions
        self.missing = len(parameters)
        self._views: list[Tensor] = []
        offset = 0
        for parameter in parameters:
            elements = part.narrow(0, offset, parameter.numel())
            self._views.append(elements.view(parameter.shape))
            offset += parameter.numel()

    def add_gradients(self, is_first: bool) -> None:
        """Add a micro-batch's gradients to the buffer, or replace its content if `is_first`, and free the gradients."""
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        views_without_gradient: list[Tensor] = []
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                views_without_gradient.append(view)
            else:
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = None
        if views:
            update = torch._foreach_copy_ if is_first else torch._foreach_add_
            update(views, gradients)
        if is_first and views_without_gradient:
            torch._foreach_zero_(views_without_gradient)


class LeanZero1(BF16_Optimizer):
    """DeepSpeed's optimizer for ZeRO 1 in bf16, with a different way to accumulate, reduce and apply the gradients.

    DeepSpeed's engine calls the methods: `set_gradient_accumulation_boundary` before each backward pass,
    `update_hp_grads` after it, `reduce_gradients` after the last one of a step, and then `step` and `zero_grad`.
    `use_lean_step` replaces the class of DeepSpeed's optimizer with this class.
    """

    def prepare(self, shard_slices: Mapping[Tensor, Sequence[slice]], communicator: Communicator) -> None:
        """Prepare for the first step; the arguments are those of `use_lean_step`.

        This is not a constructor, because the instance is DeepSpeed's, with its class replaced.
        """
        # All ranks must start their reductions in the same order, although a backward pass may complete the buckets in
        # a different order on each rank. `_order` is the common order, recorded in the first step. `_completed` lists
        # the buckets to which this backward pass has added its gradients, and `_started` counts the buckets at the
        # front of `_order` whose reductions have started.
        self._communicator = communicator
        self._is_first_micro_batch = True
        self._is_last_micro_batch = True
        self._shards: list[Tensor] = []  # this rank's shard of each gradient buffer
        self._shard_parts: list[Tensor] = []  # the parts of these shards that belong to different parameters
        self._buckets: list[_Bucket] = []
        self._completed: list[int] = []  # in the order of their completion
        self._order: list[int] = []  # empty in the first step
        self._pending: list[tuple[_Reduction, Pending]] = []
        self._started = 0  # number of buckets whose reductions have started
        groups = zip(self.bf16_groups, self.fp32_groups_gradients_flat, self.fp32_groups_flat_partition, strict=True)
        for parameters, buffer, master in groups:
            shards = buffer.chunk(communicator.world_size)
            shard = shards[communicator.rank]
            self._shards.append(shard)
            for elements in shard_slices[master]:
                if elements.start < elements.stop:
                    self._shard_parts.append(shard[elements])
            self._add_buckets(parameters, buffer, shards)
        if communicator.world_size > 1:
            for number, bucket in enumerate(self._buckets):
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(partial(self._after_gradient, number))

    def _add_buckets(self, parameters: Sequence[nn.Parameter], buffer: Tensor, shards: Sequence[Tensor]) -> None:
        """Add the buckets of a parameter group."""
        rank = self._communicator.rank
        if len(shards) == 1:
            self._buckets.append(_Bucket(parameters, buffer, []))
            return
        if len(buffer) <= BUCKET_ELEMENTS:
            reduction = _Reduction(part=buffer, owner=None, shard=shards[rank])
            self._buckets.append(_Bucket(parameters, buffer, [reduction]))
            return
        members: list[nn.Parameter] = []
        start = 0
        stop = 0
        for parameter in parameters:
            members.append(parameter)
            stop += parameter.numel()
            if stop - start >= BUCKET_ELEMENTS or parameter is parameters[-1]:
                reductions = _reductions_to_owners(buffer, slice(start, stop), shards, rank)
                self._buckets.append(_Bucket(members, buffer[start:stop], reductions))
                members = []
                start = stop

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward pass is the last one of the step."""
        super().set_gradient_accumulation_boundary(is_boundary)
        self._is_last_micro_batch = is_boundary

    def _after_gradient(self, number: int, parameter: Tensor) -> None:
        """Count a gradient that the backward pass has computed; complete its bucket if it was the last one missing."""
        bucket = self._buckets[number]
        bucket.missing -= 1
        if not bucket.missing:
            self._complete(number)

    @torch.no_grad()
    def _complete(self, number: int) -> None:
        """Add a bucket's gradients to the buffer; in the last micro-batch, start the reductions whose turn it is."""
        self._buckets[number].add_gradients(self._is_first_micro_batch)
        self._completed.append(number)
        if self._is_last_micro_batch:
            self._start_reductions()

    def _start_reductions(self) -> None:
        """Start the reductions of completed buckets up to the first bucket, in `_order`, that is not complete."""
        for number in self._order[self._started :]:
            if number not in self._completed:
                return
            for reduction in self._buckets[number].reductions:
                self._pending.append((reduction, reduction.begin(self._communicator)))
            self._started += 1

    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Add to the buffers the gradients of the buckets that are still incomplete after a backward pass.

        On several ranks, these are the buckets with parameters that have no gradient in this pass; on one rank, all.
        """
        for number, bucket in enumerate(self._buckets):
            if number not in self._completed:
                self._complete(number)
            bucket.missing = len(bucket.parameters)
        self._is_first_micro_batch = False
        if not self._is_last_micro_batch:
            self._completed = []

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Wait until this rank's shards contain the gradients averaged over ranks; all ranks call this together."""
        if not self._order:  # all ranks adopt the order in which rank 0 completed its buckets
            completed = self._completed
            self._order = self._communicator.on_rank_zero(lambda: completed)
            self._start_reductions()
        for reduction, pending in self._pending:
            reduction.finish(pending)
        if self._communicator.world_size > 1:
            torch._foreach_mul_(self._shards, 1 / self._communicator.world_size)
        self._completed = []
        self._pending = []
        self._started = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clip the gradients and update the weights, or skip the update on all ranks if the norm is not finite.

        Sets `overflow` (whether the update was skipped) and `_global_grad_norm` (a float), which DeepSpeed's engine
        reads. The host waits for the device once.
        """
        self._is_first_micro_batch = True
        # the norm over all ranks: if it is not finite, all ranks skip the step; only reading it waits for the device
        norms = torch._foreach_norm(self._shard_parts or self._shards)  # a rank may store padding alone, which is zero
        square = torch.stack(norms).square().sum()
        norm = self._communicator.all_reduce(square, "norm and overflow").sqrt()
        factor = self.clip_grad / (norm + _CLIP_EPS)
        norm_value, factor_value = torch.stack([norm, factor]).tolist()
        self._global_grad_norm = norm_value
        self.overflow = not math.isfinite(norm_value)
        if self.overflow:
            return

        # clip the shards, update the masters from them, and send the rounded weights to all ranks
        if self.clip_grad > 0 and factor_value < 1:
            torch._foreach_mul_(self._shards, factor_value)
        for master, shard in zip(self.fp32_groups_flat_partition, self._shards, strict=True):
            master.grad = shard
        self.optimizer.step()
        self.update_lp_params()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the first micro-batch of the next step replaces the gradients."""


def _reductions_to_owners(buffer: Tensor, elements: slice, shards: Sequence[Tensor], rank: int) -> list[_Reduction]:
    """Return one sum over ranks for each rank whose shard of a buffer contains some of the given elements."""
    reductions = []
    shard_size = len(shards[0])
    for owner in range(len(shards)):
        start = max(elements.start, owner * shard_size)
        stop = min(elements.stop, (owner + 1) * shard_size)
        if start < stop:
            reductions.append(_Reduction(part=buffer[start:stop], owner=owner, shard=shards[rank]))
    return reductions


def use_lean_step(optimizer: Any, shard_slices: Mapping[Tensor, Sequence[slice]], communicator: Communicator) -> None:
    """Replace the step of DeepSpeed's `BF16_Optimizer` with the step of `LeanZero1`.

    Args:
        optimizer: the optimizer of DeepSpeed's engine, before its first step.
        shard_slices: for each flat tensor of master weights on this rank, the slices that its parameters occupy.
        communicator: communicator between the engine's ranks.
    """
    optimizer.__class__ = LeanZero1
    optimizer.prepare(shard_slices, communicator)
