"""LAMB (You et al. 2020, Algorithm 2) with trust ratios computed over whole parameters, even under ZeRO.

The trust ratio needs norms of a whole parameter, but ZeRO 1-3 give the optimizer only this rank's flat shard of a
parameter group. The squared norm of a parameter is therefore summed over its parts on all ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's direction plus decoupled weight decay, scaled to the parameter's norm if its group sets `adapt`."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        self._parts: Mapping[Tensor, Sequence[slice]] = {}
        self._communicator: Communicator | None = None
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    def shard(self, parts: Mapping[Tensor, Sequence[slice]], communicator: Communicator) -> None:
        """Prepare for flat shards of several parameters; each step then needs one all-reduce over all ranks.

        `parts` lists the slices of each shard, one slice per parameter, in the same order on all ranks. Elements
        outside the slices are padding and do not change.
        """
        self._parts, self._communicator = parts, communicator

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        work = [(group, *found) for group in self.param_groups for found in self._directions(group)]
        adapted = [(weight, update) for group, weight, update in work if group["adapt"]]
        if adapted:
            for (_, update), ratio in zip(adapted, self._trust_ratios(adapted), strict=True):
                update *= ratio
        for group, weight, update in work:
            weight.sub_(update, alpha=group["lr"])

    def _directions(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Update the moments and yield each of a group's parameters, or its local part, with its update direction."""
        beta1, beta2 = group["betas"]
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            t = float(state["step"])
            for part in self._parts.get(p, (...,)):
                weight, gradient, moment, square = (x[part] for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
                moment.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                # m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w
                update = square.sqrt().div_(math.sqrt(1 - beta2**t)).add_(group["eps"]).reciprocal_()
                yield weight, update.mul_(moment).div_(1 - beta1**t).add_(weight, alpha=group["weight_decay"])

    def _trust_ratios(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return (P,) trust ratios: the norm of each of P parameters divided by the norm of its update direction."""
        sides = zip(*pairs, strict=True)
        norms = torch.stack([torch.stack([torch.linalg.vector_norm(x) for x in side]) for side in sides])
        if self._communicator is not None:  # offloaded shards are on the CPU, but the collective needs the device
            squares = norms.square().to(self._communicator.device)
            norms = self._communicator.all_reduce(squares, "optimizer").to(norms.device).sqrt()
        weight_norm, update_norm = norms
        return torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
