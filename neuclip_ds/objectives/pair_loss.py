"""The pair loss l of a contrastive objective, applied to similarity differences before the exponential."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PairLoss(Protocol):
    """l(x) of x = s_ij - s_ii, in place, and its slope l'(x).

    Attributes:
        is_identity: whether l(x) = x.
    """

    is_identity: bool

    def value_(self, x: Tensor) -> Tensor:
        """Overwrite x with l(x)."""
        ...

    def slope(self, x: Tensor) -> Tensor | None:
        """Return l'(x), or None if it is 1 everywhere."""
        ...

    def divisor(self, size: int) -> int:
        """Return the divisor of the sum over an anchor's negatives in a batch of `size` rows."""
        ...


class Identity:
    """l(x) = x: every method but TuneCLIP."""

    is_identity = True

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

    is_identity = False

    def __init__(self, margin: float, power: float) -> None:
        self.margin, self.power = margin, power

    def divisor(self, size: int) -> int:
        return size

    def value_(self, x: Tensor) -> Tensor:
        return x.add_(self.margin).clamp_(min=0).pow_(self.power)

    def slope(self, x: Tensor) -> Tensor:
        above = (x + self.margin).clamp_(min=0)
        # the factor (above > 0) matters for power 1 alone, where 0^0 would be 1
        return above.pow(self.power - 1).mul_(self.power).mul_(above > 0)
