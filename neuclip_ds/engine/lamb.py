"""LAMB (You et al. 2020, Algorithm 2) with trust ratios computed over whole parameters, even under ZeRO.

The trust ratio needs norms of a whole parameter, but ZeRO 1-3 give the optimizer only this rank's flat shard of a
parameter group. The squared norm of a parameter is therefore summed over its parts on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's direction plus decoupled weight decay, scaled to the parameter's norm unless `adapt` is False.

    `adapt` is an option of a parameter group.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        self._shard_slices: Mapping[Tensor, Sequence[slice]] = {}
        self._communicator: Communicator | None = None
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    def shard(self, shard_slices: Mapping[Tensor, Sequence[slice]], communicator: Communicator) -> None:
        """Prepare for flat shards of several parameters each; every step then needs one all-reduce over all ranks.

        `shard_slices` lists the slices of each shard, one slice per parameter, in the same order on all ranks. Elements
        outside the slices are padding and do not change.
        """
        self._shard_slices = shard_slices
        self._communicator = communicator

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        updates = [update for group in self.param_groups for update in self._updates(group)]
        adapted = [update for update in updates if update.group["adapt"]]
        if adapted:
            for update, ratio in zip(adapted, self._trust_ratios(adapted), strict=True):
                update.direction.mul_(ratio)
        for update in updates:
            update.weight.sub_(update.direction, alpha=update.group["lr"])

    def _updates(self, group: dict[str, Any]) -> Iterator[_Update]:
        """Update the moments and yield each of a group's parameters, or its local part, with its update direction."""
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            t = float(state["step"])
            for elements in self._shard_slices.get(parameter, (...,)):
                weight = parameter[elements]
                gradient = parameter.grad[elements]
                moment = state["exp_avg"][elements]
                square = state["exp_avg_sq"][elements]
                moment.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                # m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w
                direction = square.sqrt().div_(math.sqrt(1 - beta2**t)).add_(group["eps"]).reciprocal_()
                direction.mul_(moment).div_(1 - beta1**t).add_(weight, alpha=group["weight_decay"])
                yield _Update(group, weight, direction)

    def _trust_ratios(self, updates: Sequence[_Update]) -> Tensor:
        """Return (P,) trust ratios: a parameter's norm divided by the norm of its direction, or 1 if either is 0."""
        weight_norms = [torch.linalg.vector_norm(update.weight) for update in updates]
        direction_norms = [torch.linalg.vector_norm(update.direction) for update in updates]
        norms = torch.stack([torch.stack(weight_norms), torch.stack(direction_norms)])
        if self._communicator is not None:  # shards may be offloaded to the CPU, but the collective needs the GPU
            squares = norms.square().to(self._communicator.device)
            norms = self._communicator.all_reduce(squares, "optimizer").to(norms.device).sqrt()
        weight_norm, direction_norm = norms
        return torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, 1.0)


class _Update(NamedTuple):
    """The update of a parameter, or of its local part."""

    group: dict[str, Any]
    weight: Tensor
    direction: Tensor
