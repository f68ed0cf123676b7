"""The pair loss l of a contrastive objective, applied to similarity differences before the exponential."""

from torch import Tensor


class PairLoss:
    """l(x) of x = s_ij - s_ii; the identity, as every method but TuneCLIP has it.

    Attributes:
        is_identity: whether l(x) = x.
    """

    is_identity = True

    def value_(self, x: Tensor) -> Tensor:
        """Overwrite x with l(x)."""
        return x

    def slope(self, x: Tensor) -> Tensor | None:
        """Return l'(x), or None if it is 1 everywhere."""
        return None

    def divisor(self, size: int) -> int:
        """Return the divisor of the sum over an anchor's negatives in a batch of `size` rows."""
        return size - 1


class OverBatch(PairLoss):
    """l(x) = x as TuneCLIP's global contrastive loss has it, which divides an anchor's sum by the whole batch."""

    def divisor(self, size: int) -> int:
        return size


class Hinge(OverBatch):
    """l(x) = max(x + margin, 0)^power (TuneCLIP eq. 8): pairs beyond the margin contribute no gradient."""

    is_identity = False

    def __init__(self, margin: float, power: float) -> None:
        self.margin, self.power = margin, power

    def value_(self, x: Tensor) -> Tensor:
        return x.add_(self.margin).clamp_(min=0).pow_(self.power)

    def slope(self, x: Tensor) -> Tensor:
        above = (x + self.margin).clamp_(min=0)
        # the factor (above > 0) matters for power 1 alone, where 0^0 would be 1
        return above.pow(self.power - 1).mul_(self.power).mul_(above > 0)
