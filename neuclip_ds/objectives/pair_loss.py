"""Pair losses: the function l of x = s_ij - s_ii in the terms exp(l(x)/tau) of a contrastive loss."""

import torch
from torch import Tensor

from neuclip_ds.objectives.pair_arithmetic import bounded_exp_


class PairLoss:
    """Pair loss l(x) of x = s_ij - s_ii: here the identity, as in every method except `tuneclip`.

    Every pair loss satisfies (x + margin) l'(x) = power l(x). Dividing x + margin by tau^(1/power) therefore divides
    l(x) by tau.

    Attributes:
        margin, power: constants of this equation; 0 and 1 for the identity.
        excluded: 1, or 0 in TuneCLIP's losses. The sum over negatives in a batch of B rows is divided by B - excluded.
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
        """Return the constant that `exponent` omits from an anchor's l/tau; `origin` has shape (2, rows)."""
        return -origin

    def exponent(self, y: Tensor, origin: Tensor, out: Tensor | None) -> Tensor:
        """Return l/tau without the anchor's constant (see `offset`); the returned tensor may be `out` or y.

        Args:
            y: (rows, columns) similarities of a block, divided by tau^(1/power).
            origin: (rows, 1) or (1, columns) values s_ii - margin of the anchors, divided in the same way.
            out: (rows, columns) buffer to overwrite, which may be y; None for a new tensor.
        """
        return y

    def weight(self, y: Tensor, origin: Tensor, log_factor: Tensor, out: Tensor | None, spare: Tensor | None) -> Tensor:
        """Return the (rows, columns) values of exp(l/tau + log_factor) l'/power at y - origin.

        The arguments are those of `exponent`, the anchors' `log_factor`, and `spare`, which is None or a second buffer
        that is not y.
        """
        return bounded_exp_(torch.add(y, log_factor - origin, out=out))


class Hinge(PairLoss):
    """Hinge pair loss l(x) = max(x + margin, 0)^2 (TuneCLIP eq. 8); pairs with x < -margin have zero gradient."""

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
