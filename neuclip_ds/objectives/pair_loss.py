"""The pair loss l of a contrastive objective, applied to similarity differences before the exponential."""

import torch
from torch import Tensor

from neuclip_ds.objectives.exponents import bounded_exp_


class PairLoss:
    """l(x) of x = s_ij - s_ii; the identity, as every method but TuneCLIP has it.

    (x + margin) l'(x) = power l(x), so that l(x)/tau is l of a difference whose distance from -margin is divided by
    tau^(1/power).

    Attributes:
        margin, power: 0 and 1 for the identity.
        is_identity: whether l(x) = x.
    """

    is_identity = True
    margin, power = 0.0, 1.0

    def value_(self, x: Tensor) -> Tensor:
        """Overwrite x with l(x)."""
        return x

    def offset(self, origin: Tensor) -> Tensor:
        """Return what l/tau of an anchor's pairs has besides `exponent`; `origin` as there, (2, rows)."""
        return -origin

    def exponent(self, y: Tensor, origin: Tensor, out: Tensor) -> Tensor:
        """Return l/tau, but for a number of each anchor, in `out` or as y itself.

        Args:
            y: (rows, columns) similarities of a block, divided by tau^(1/power).
            origin: the anchors' s_ii - margin, divided likewise, (rows, 1) or (1, columns).
            out: (rows, columns) that may be overwritten, also y.
        """
        return y

    def weight(self, y: Tensor, origin: Tensor, log_factor: Tensor, out: Tensor, spare: Tensor) -> Tensor:
        """Return the (rows, columns) exp(l/tau + log_factor) times l'/power at y - origin.

        Arguments are those of `exponent`, a number of each anchor, and `spare`, overwritten too but not y.
        """
        return bounded_exp_(torch.add(y, log_factor - origin, out=out))

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

    def offset(self, origin: Tensor) -> Tensor:
        return torch.zeros_like(origin)

    def exponent(self, y: Tensor, origin: Tensor, out: Tensor) -> Tensor:
        return torch.sub(y, origin, out=out).clamp_(min=0).pow_(self.power)

    def weight(self, y: Tensor, origin: Tensor, log_factor: Tensor, out: Tensor, spare: Tensor) -> Tensor:
        above = torch.sub(y, origin, out=spare).clamp_(min=0)
        exponential = bounded_exp_(torch.pow(above, self.power, out=out).add_(log_factor))
        # 0^0 is 1, but beyond the margin the slope of power 1 is 0
        return exponential.mul_(above.pow_(self.power - 1) if self.power > 1 else above.sign_())
