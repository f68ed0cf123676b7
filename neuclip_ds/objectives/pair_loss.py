"""The pair loss l of a contrastive objective: what a difference of similarities counts before the exponential."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from neuclip_ds.config import ObjectiveConfig


class PairLoss(Protocol):
    """l(x) of x = s_ij - s_ii, in place, and its slope l'(x)."""

    def value_(self, x: Tensor) -> Tensor:
        """Overwrites x with l(x)."""
        ...

    def slope(self, x: Tensor) -> Tensor | None:
        """l'(x), or None where it is 1 everywhere."""
        ...

    def divisor(self, size: int) -> int:
        """What the sum over an anchor's negatives in a batch of `size` rows is divided by."""
        ...


class Identity:
    """l(x) = x: every method but TuneCLIP."""

    def __init__(self, config: ObjectiveConfig) -> None:
        pass

    def value_(self, x: Tensor) -> Tensor:
        return x

    def slope(self, x: Tensor) -> None:
        return None

    def divisor(self, size: int) -> int:
        return size - 1


class OverBatch(Identity):
    """l(x) = x as TuneCLIP's global contrastive loss has it, which divides an anchor's sum by the whole batch."""

    def divisor(self, size: int) -> int:
        return size


class Hinge:
    """l(x) = max(x + margin, 0)^power (TuneCLIP eq. 8): pairs beyond the margin contribute no gradient.

    TuneCLIP divides an anchor's sum by the whole batch.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.margin, self.power = config.hinge.margin, config.hinge.power

    def divisor(self, size: int) -> int:
        return size

    def value_(self, x: Tensor) -> Tensor:
        return x.add_(self.margin).clamp_(min=0).pow_(self.power)

    def slope(self, x: Tensor) -> Tensor:
        above = (x + self.margin).clamp_(min=0)
        # the factor (above > 0) matters for power 1 alone, where 0^0 would be 1
        return above.pow(self.power - 1).mul_(self.power).mul_(above > 0)
