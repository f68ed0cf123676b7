"""LAMB (You et al. 2020, Algorithm 2) whose trust ratios stay those of whole parameters under ZeRO.

The trust ratio is a norm over a parameter, but ZeRO 1-3 hand an optimizer this rank's flat shard of each parameter
group. With one parameter a group the shards' squared norms, summed over ranks, are exactly the parameter's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator


class Lamb(torch.optim.Optimizer):
    """Adam's direction plus decoupled decay, rescaled to the parameter's own norm in groups with `adapt`.

    Args:
        groups: parameter groups of one parameter each, with `adapt` and `weight_decay`.
        communicator: the ranks that hold a parameter's shards; None where each holds all of it.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        communicator: Communicator | None = None,
    ) -> None:
        self._communicator = communicator
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not work:
            return
        updates = [self._direction(group, p, p.grad) for group, p in work]
        weights = [p for _, p in work]
        squares = torch.stack([torch.stack([x.square().sum() for x in side]) for side in (weights, updates)])
        if self._communicator is not None:  # offloaded shards are on the CPU, what travels is not
            there = squares.to(self._communicator.device)
            squares = self._communicator.all_reduce(there, "optimizer").to(squares.device)
        weight_norm, update_norm = squares.sqrt()
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        for number, ((group, p), update) in enumerate(zip(work, updates, strict=True)):
            p.sub_(update * (ratio[number] if group["adapt"] else 1.0), alpha=group["lr"])

    def _direction(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
        times = float(state["step"])
        denominator = (state["exp_avg_sq"] / (1 - beta2**times)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**times)).div_(denominator).add_(p, alpha=group["weight_decay"])
