"""LAMB (You et al. 2020, Algorithm 2) whose trust ratios stay those of whole parameters under ZeRO.

The trust ratio is a norm over a parameter, but ZeRO 1-3 hand an optimizer this rank's flat shard of a parameter group.
The squared norms of the parts of that shard, each of one parameter, summed over ranks, are the parameters'.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        work = [
            (group, weight, update)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
            for weight, update in self._directions(group, p, p.grad)
        ]
        adapted = [(weight, update) for group, weight, update in work if group["adapt"]]
        if adapted:
            for (_, update), ratio in zip(adapted, self._trust_ratios(adapted), strict=True):
                update.mul_(ratio)
        for group, weight, update in work:
            weight.sub_(update, alpha=group["lr"])

    def _directions(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that p holds, or its part, with its direction; moments move."""
        state = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        times, (beta1, beta2) = float(state["step"]), group["betas"]
        for part in self._parts.get(p, (...,)):
            weight, g, m, v = (x[part] for x in (p, gradient, state["exp_avg"], state["exp_avg_sq"]))
            m.lerp_(g, 1 - beta1)
            v.lerp_(g.square(), 1 - beta2)
            denominator = (v / (1 - beta2**times)).sqrt_().add_(group["eps"])
            yield weight, (m / (1 - beta1**times)).div_(denominator).add_(weight, alpha=group["weight_decay"])

    def _trust_ratios(self, adapted: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """(P,) norm of each of P parameters over that of its direction."""
        squares = torch.stack([torch.stack([x.square().sum() for x in side]) for side in zip(*adapted, strict=True)])
        if self._communicator is not None:  # offloaded shards are on the CPU, what travels is not
            there = squares.to(self._communicator.device)
            squares = self._communicator.all_reduce(there, "optimizer").to(squares.device)
        weight_norm, update_norm = squares.sqrt()
        return torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
