"""Optimizers of NeuCLIP's prototypes, which minimize J; see neuclip.py for the symbols."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip_ds.losses.base import AdamSettings
from neuclip_ds.losses.neuclip_options import NpnConfig
from neuclip_ds.losses.pairs import IMAGE, TEXT

_ADAGRAD_EPS = 1e-10  # torch's default
# Added to 1/B sum_i p_ik (1 + |1 - r_i|) in the scaled update, in units of 1/m, which is about the mean of 1/B sum_i
# p_ik over the prototypes; a prototype with a far smaller sum hardly moves.
_DELTA = 1e-3


@dataclass(frozen=True, kw_only=True)
class Update:
    """Values that an optimizer may use in an update, in addition to the gradients."""

    share: Tensor
    """(2, B, local prototypes): softmax of z_ik over this rank's prototypes"""
    mass: Tensor
    """(2, B): sum_k p_ik / B over this rank's prototypes, so that p_ik / B = mass_i share_ik"""
    residual: Tensor
    """(2, B): r_i"""
    unit: Tensor
    """(2, local prototypes, d): W_k / |W_k|"""
    norm: Tensor
    """(2, local prototypes, 1): |W_k|"""
    tau: Tensor
    """0-dim temperature"""
    lr: float
    """The encoders' learning rate"""


class PrototypeOptimizer:
    """Base class of the optimizers.

    Attributes:
        moments: state in the shape of the prototypes, (2, local prototypes, d), by name.
    """

    def __init__(self) -> None:
        self.moments: dict[str, Tensor] = {}

    def step(self, prototypes: Tensor, gradients: Iterable[tuple[slice, Tensor]], update: Update) -> None:
        """Update this rank's (2, local prototypes, d) prototypes in place.

        Args:
            prototypes: W1 and W2.
            gradients: slices that together contain each local prototype once, each with the (2, size of the slice, d)
                gradients dJ/dW_k, which may be overwritten.
            update: other values, which must not be changed.
        """
        raise NotImplementedError

    def replicated_state(self) -> dict[str, Tensor]:
        """Return the state that is equal on all ranks, by name."""
        return {}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state that `replicated_state` returned; `state` may contain other entries."""


class Scaled(PrototypeOptimizer):
    """The scaled update: each step moves a prototype by at most `npn.lr` times tau on the unit sphere."""

    def __init__(self, config: NpnConfig) -> None:
        super().__init__()
        self._lr = config.rate
        self._floor = _DELTA / config.prototypes

    def step(self, prototypes: Tensor, gradients: Iterable[tuple[slice, Tensor]], update: Update) -> None:
        bound = update.mass * (1 + (1 - update.residual).abs())
        for columns, gradient in gradients:
            # 1/B sum_i p_ik (1 + |1 - r_i|), an upper bound on |W_k| times the gradient's norm
            bounds = torch.stack([bound[side] @ update.share[side][:, columns] for side in (IMAGE, TEXT)])
            norm = update.norm[:, columns]
            change = gradient.mul_(norm * update.tau * self._lr / (bounds + self._floor).unsqueeze(2))
            prototype = prototypes[:, columns]
            torch.sub(update.unit[:, columns], change, out=prototype)
            prototype.div_(torch.linalg.vector_norm(prototype, dim=2, keepdim=True))


class AdaGrad(PrototypeOptimizer):
    """AdaGrad with torch's formula: the accumulator sums squared gradients, and weight decay is added to gradients."""

    def __init__(self, config: NpnConfig, prototypes: Tensor) -> None:
        super().__init__()
        self._lr = config.rate
        self._weight_decay = config.weight_decay
        self.moments["accumulator"] = torch.zeros_like(prototypes)

    def step(self, prototypes: Tensor, gradients: Iterable[tuple[slice, Tensor]], update: Update) -> None:
        for columns, gradient in gradients:
            prototype = prototypes[:, columns]
            accumulator = self.moments["accumulator"][:, columns]
            if self._weight_decay:
                gradient.add_(prototype, alpha=self._weight_decay)
            accumulator.addcmul_(gradient, gradient)
            prototype.addcdiv_(gradient, accumulator.sqrt().add_(_ADAGRAD_EPS), value=-self._lr)


class AdamW(PrototypeOptimizer):
    """AdamW, for the ablation that updates prototypes and encoders together (Algorithm 3).

        M <- beta_1 M + (1 - beta_1) dJ/dW,   V <- beta_2 V + (1 - beta_2) (dJ/dW)^2
        W <- (1 - lr lambda) W - lr M/(1 - beta_1^t) / (sqrt(V/(1 - beta_2^t)) + epsilon)

    The learning rate, the betas and epsilon are those of the encoders' optimizer, because Algorithm 3 has a single
    optimizer for the encoders and the prototypes. The paper does not give a value for the weight decay lambda.
    """

    def __init__(self, config: NpnConfig, adam: AdamSettings, prototypes: Tensor) -> None:
        super().__init__()
        self._weight_decay = config.weight_decay
        self._adam = adam
        self._steps = 0  # t
        self.moments["moment"] = torch.zeros_like(prototypes)
        self.moments["square"] = torch.zeros_like(prototypes)

    def step(self, prototypes: Tensor, gradients: Iterable[tuple[slice, Tensor]], update: Update) -> None:
        self._steps += 1
        lr = update.lr
        beta1, beta2 = self._adam.betas
        correction1 = 1 - beta1**self._steps
        correction2 = 1 - beta2**self._steps
        for columns, gradient in gradients:
            moment = self.moments["moment"][:, columns]
            square = self.moments["square"][:, columns]
            moment.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (square / correction2).sqrt_().add_(self._adam.eps)
            prototype = prototypes[:, columns]
            prototype.mul_(1 - lr * self._weight_decay).addcdiv_(moment, denominator, value=-lr / correction1)

    def replicated_state(self) -> dict[str, Tensor]:
        return {"updates": torch.tensor(self._steps, device="cpu")}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._steps = int(state["updates"])


def prototype_optimizer(config: NpnConfig, adam: AdamSettings, prototypes: Tensor) -> PrototypeOptimizer:
    """Return the optimizer of the prototypes that the options select."""
    if config.order == "joint":
        return AdamW(config, adam, prototypes)
    if config.optimizer == "adagrad":
        return AdaGrad(config, prototypes)
    return Scaled(config)
