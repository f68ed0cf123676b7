"""LAMB (You et al. 2020, Algorithm 2) whose trust ratios stay those of whole parameters under ZeRO.

The trust ratio is a norm over a parameter, but ZeRO 1-3 hand an optimizer this rank's flat shard of a parameter group.
The squared norms of the parts of that shard, each of one parameter, summed over ranks, are the parameters'.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator


class Lamb(torch.optim.Optimizer):
    """Adam's direction plus decoupled decay, rescaled to the parameter's own norm in groups with `adapt`."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        self._parts: Mapping[Tensor, Sequence[slice]] = {}
        self._communicator: Communicator | None = None
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    def shard(self, parts: Mapping[Tensor, Sequence[slice]], communicator: Communicator) -> None:
        """Step on flat shards of several parameters, with one all-reduce over the ranks that hold the other shards.

        `parts` are what each shard holds of each parameter of its group, in the same order on all ranks; elements
        outside, which pad the shard, are left alone.
        """
        self._parts, self._communicator = parts, communicator

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        work = [(group, *self._directions(group)) for group in self.param_groups]
        work = [(group, weights, updates) for group, weights, updates in work if weights]
        adapted = [(weights, updates) for group, weights, updates in work if group["adapt"]]
        if adapted:
            all_weights, all_updates = (list(chain.from_iterable(side)) for side in zip(*adapted, strict=True))
            torch._foreach_mul_(all_updates, list(self._trust_ratios(all_weights, all_updates)))
        for group, weights, updates in work:
            torch._foreach_sub_(weights, updates, alpha=group["lr"])

    def _directions(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Move the moments and return a group's parameters, or their parts, with the direction of each."""
        held: list[tuple[Tensor, ...]] = []
        times: list[float] = []
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            parts = self._parts.get(p, (...,))
            held += [tuple(x[part] for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])) for part in parts]
            times += [float(state["step"])] * len(parts)
        if not held:
            return [], []
        weights, gradients, moments, squares = (list(tensors) for tensors in zip(*held, strict=True))
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(moments, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        # m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w, without a second copy of the parameters
        updates = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(updates, [math.sqrt(1 - beta2**t) for t in times])
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, moments)
        torch._foreach_div_(updates, [1 - beta1**t for t in times])
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return weights, updates

    def _trust_ratios(self, weights: list[Tensor], updates: list[Tensor]) -> Tensor:
        """(P,) norm of each of P parameters over that of its direction."""
        norms = torch.stack([torch.stack(torch._foreach_norm(side)) for side in (weights, updates)])
        if self._communicator is not None:  # offloaded shards are on the CPU, what travels is not
            squares = norms.square().to(self._communicator.device)
            norms = self._communicator.all_reduce(squares, "optimizer").to(norms.device).sqrt()
        weight_norm, update_norm = norms
        return torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
