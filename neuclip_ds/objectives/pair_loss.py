"""Pair losses: the function l of x = s_ij - s_ii that a contrastive loss sums over an anchor's negatives."""

import torch
from torch import Tensor

from neuclip_ds.objectives.pair_arithmetic import bounded_exp_


class PairLoss:
    """Pair loss l(x) of x = s_ij - s_ii: the identity, as in every method but TuneCLIP.

    (x + margin) l'(x) = power l(x), so that l(x)/tau is l of a difference whose distance from -margin is divided by
    tau^(1/power).

    Attributes:
        margin, power: 0 and 1 for the identity.
        excluded: a sum over negatives in a batch of B rows is divided by B - 1, or in TuneCLIP's losses by B - 0.
        is_identity: whether l(x) = x.
    """

    is_identity = True
    margin, power = 0.0, 1.0

    def __init__(self, excluded: int = 1) -> None:
        self.excluded = excluded

    def value_(self, x: Tensor) -> Tensor:
        """Overwrite x with l(x)."""
        return x

    def offset(self, origin: Tensor) -> Tensor:
        """Return the constant that `exponent` omits from an anchor's l/tau; `origin` is (2, rows)."""
        return -origin

    def exponent(self, y: Tensor, origin: Tensor, out: Tensor | None) -> Tensor:
        """Return l/tau without the anchor's constant (see `offset`), in `out` or as y itself.

        Args:
            y: (rows, columns) similarities of a block, divided by tau^(1/power).
            origin: the anchors' s_ii - margin, divided in the same way, (rows, 1) or (1, columns).
            out: (rows, columns) buffer to overwrite, which may be y; None for a new tensor.
        """
        return y

    def weight(self, y: Tensor, origin: Tensor, log_factor: Tensor, out: Tensor | None, spare: Tensor | None) -> Tensor:
        """Return the (rows, columns) exp(l/tau + log_factor) times l'/power at y - origin.

        Arguments are those of `exponent`, the anchors' log_factor, and `spare`, a second buffer or None,
        which must not be y.
        """
        return bounded_exp_(torch.add(y, log_factor - origin, out=out))


class Hinge(PairLoss):
    """l(x) = max(x + margin, 0)^2 (TuneCLIP eq. 8): pairs beyond the margin contribute no gradient."""

    is_identity = False
    power = 2.0

    def __init__(self, margin: float) -> None:
        super().__init__(excluded=0)
        self.margin = margin

    def value_(self, x: Tensor) -> Tensor:
        return x.add_(self.margin).clamp_(min=0).square_()

    def offset(self, origin: Tensor) -> Tensor:
        return torch.zeros_like(origin)

    def exponent(self, y: Tensor, origin: Tensor, out: Tensor | None) -> Tensor:
        return torch.sub(y, origin, out=out).clamp_(min=0).square_()

    def weight(self, y: Tensor, origin: Tensor, log_factor: Tensor, out: Tensor | None, spare: Tensor | None) -> Tensor:
        above = torch.sub(y, origin, out=spare).clamp_(min=0)
        return bounded_exp_(torch.square(above, out=out).add_(log_factor)).mul_(above)
