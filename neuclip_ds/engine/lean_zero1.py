"""A ZeRO 1 step in bf16 that computes the same weights as DeepSpeed's with fewer kernels and copies.

DeepSpeed casts and adds each parameter's gradient separately, copies all gradients into another buffer and back to
all-reduce them, launches one norm per parameter, and fills the buffers with zeros after the step. `LeanZero1` copies
the gradients to DeepSpeed's float32 buffers with one call per buffer, sums each buffer with one reduce-scatter, and
reads the norm of this rank's shard only. Masters, moments and their layout are DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from neuclip_ds.distributed.communicator import Communicator

_CLIP_EPS = 1e-6  # DeepSpeed adds it to the norm before it divides


@dataclass(frozen=True, kw_only=True)
class _GradientBuffer:
    """The float32 gradients of a parameter group."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor  # (n,) gradients of all parameters, and padding that is zero
    views: Sequence[Tensor]  # of `flat`, shaped like the parameters
    shard_slices: Sequence[slice]  # of this rank's shard of `flat`, one for each parameter that the shard contains

    def add_gradients(self, is_first: bool) -> None:
        """Add the gradients of a micro-batch and free them; the first micro-batch of a step replaces the content."""
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        views_without_gradient: list[Tensor] = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
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

    def parts(self, shard: Tensor) -> list[Tensor]:
        """Return the parts of this rank's shard that belong to different parameters."""
        # a shard may consist of padding, whose norm is 0
        return [shard[elements] for elements in self.shard_slices] or [shard]


class LeanZero1(BF16_Optimizer):
    """DeepSpeed's optimizer for ZeRO 1 in bf16, with another way to accumulate, reduce and apply the gradients.

    DeepSpeed's engine calls the methods: `update_hp_grads` after each backward pass, `reduce_gradients` after the last
    one of a step, and then `step` and `zero_grad`. `use_lean_step` makes an instance.
    """

    def prepare(self, shard_slices: Mapping[Tensor, Sequence[slice]], communicator: Communicator) -> None:
        """Prepare for the first step; the arguments are those of `use_lean_step`."""
        self._communicator = communicator
        self._is_first_micro_batch = True
        self._shards: list[Tensor] = []  # this rank's shards of the summed gradients, from the reduction to the step
        self._buffers: list[_GradientBuffer] = []
        groups = zip(self.bf16_groups, self.fp32_groups_gradients_flat, self.fp32_groups_flat_partition, strict=True)
        for parameters, flat, master in groups:
            sizes = [parameter.numel() for parameter in parameters]
            padding = len(flat) - sum(sizes)
            pieces = flat.split([*sizes, padding])[: len(sizes)]
            views = [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]
            slices = [elements for elements in shard_slices[master] if elements.start < elements.stop]
            buffer = _GradientBuffer(parameters=parameters, flat=flat, views=views, shard_slices=slices)
            self._buffers.append(buffer)

    @torch.no_grad()
    def update_hp_grads(self, clear_lp_grads: bool = False) -> None:
        """Add the gradients of a micro-batch to the buffers and free them."""
        for buffer in self._buffers:
            buffer.add_gradients(self._is_first_micro_batch)
        self._is_first_micro_batch = False

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Average the buffers over ranks; each rank receives its shards."""
        reductions = []
        for buffer in self._buffers:
            reductions.append(self._communicator.begin_reduce_scatter(buffer.flat, "gradient reduce"))
        self._shards = [reduction.wait() for reduction in reductions]
        if self._communicator.world_size > 1:
            torch._foreach_mul_(self._shards, 1 / self._communicator.world_size)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clip the gradients and update the weights, or skip the update if the norm is not finite on any rank.

        Sets `overflow` (whether the update was skipped) and `_global_grad_norm` (a float), which DeepSpeed's engine
        reads. The host waits for the device once.
        """
        shards = self._shards
        self._shards = []
        self._is_first_micro_batch = True

        parts: list[Tensor] = []
        for buffer, shard in zip(self._buffers, shards, strict=True):
            parts += buffer.parts(shard)
        square = torch.stack(torch._foreach_norm(parts)).square().sum()
        norm = self._communicator.all_reduce(square, "norm and overflow").sqrt()
        factor = self.clip_grad / (norm + _CLIP_EPS)
        norm_value, factor_value = torch.stack([norm, factor]).tolist()
        self._global_grad_norm = norm_value
        self.overflow = not math.isfinite(norm_value)
        if self.overflow:
            return

        if self.clip_grad > 0 and factor_value < 1:
            torch._foreach_mul_(shards, factor_value)
        for master, shard in zip(self.fp32_groups_flat_partition, shards, strict=True):
            master.grad = shard
        self.optimizer.step()
        for master in self.fp32_groups_flat_partition:
            master.grad = None
        self.update_lp_params()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the first micro-batch of the next step replaces the gradients."""


def use_lean_step(optimizer: Any, shard_slices: Mapping[Tensor, Sequence[slice]], communicator: Communicator) -> None:
    """Make DeepSpeed's `BF16_Optimizer` step as `LeanZero1` does.

    Args:
        optimizer: the optimizer of DeepSpeed's engine, before its first step.
        shard_slices: for each of this rank's flat master weights, the slice of each parameter.
        communicator: the ranks of the engine.
    """
    optimizer.__class__ = LeanZero1
    optimizer.prepare(shard_slices, communicator)
