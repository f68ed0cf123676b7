"""The pair loss l of a contrastive objective: what a difference of similarities counts before the exponential."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PairLoss(Protocol):
    """l(x) of x = s_ij - s_ii, in place, and its slope l'(x)."""

    def value_(self, x: Tensor) -> Tensor:
        """Overwrites x with l(x)."""
        ...

    def slope(self, x: Tensor) -> Tensor | None:
        """l'(x), or None where it is 1 everywhere."""
        ...


class Identity:
    """l(x) = x: every method but TuneCLIP."""

    def value_(self, x: Tensor) -> Tensor:
        return x

    def slope(self, x: Tensor) -> None:
        return None


class Hinge:
    """l(x) = max(x + margin, 0)^power (TuneCLIP eq. 8): pairs beyond the margin contribute no gradient."""

    def __init__(self, margin: float = 0.1, power: float = 2.0) -> None:
        self.margin = margin
        self.power = power

    def value_(self, x: Tensor) -> Tensor:
        return x.add_(self.margin).clamp_(min=0).pow_(self.power)

    def slope(self, x: Tensor) -> Tensor:
        above = (x + self.margin).clamp_(min=0)
        # the factor (above > 0) matters for power 1 alone, where 0^0 would be 1
        return above.pow(self.power - 1).mul_(self.power).mul_(above > 0)
