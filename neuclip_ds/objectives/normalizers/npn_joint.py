"""NeuCLIP's ablation of the order: prototypes and encoders move at once, all by AdamW (NeuCLIP Algorithm 3).

A step takes alpha_i from the prototypes as they are, and its gradient dJ/dW_k (npn.py) moves them once:

    M <- beta_1 M + (1 - beta_1) dJ/dW,   V <- beta_2 V + (1 - beta_2) (dJ/dW)^2
    W <- (1 - lr lambda) W - lr M/(1 - beta_1^t) / (sqrt(V/(1 - beta_2^t)) + epsilon)

lr, betas and epsilon are the encoders', as both have one optimizer in Algorithm 3; the paper has no value for lambda.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from neuclip_ds.objectives.base import Context, NormalizerOutput, Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.methods.neuclip import NpnConfig
from neuclip_ds.objectives.normalizers.npn import NpnNormalizer
from neuclip_ds.state.partition import RowTable


class JointNpnNormalizer(NpnNormalizer):
    """The prototypes' network with one AdamW step instead of T_u of AdaGrad; a restart keeps the moments."""

    def __init__(self, config: NpnConfig, eps: float, context: Context) -> None:
        simultaneous = config.model_copy(update={"order": "simultaneous"})
        super().__init__(simultaneous, eps, context._replace(own_optimizers=False))
        (self._betas, self._adam_eps), self._weight_decay = context.adam, config.weight_decay
        self._moments = [torch.zeros_like(prototype.detach()) for prototype in self._prototypes]
        self._squares = [torch.zeros_like(prototype.detach()) for prototype in self._prototypes]
        self._updates = 0

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        estimate = super().__call__(batch, log_g, tau, step)
        if step.learn and self._drawn:
            self._updates += 1
            self._descend(step.lr)
        return estimate

    def _descend(self, lr: float) -> None:
        beta1, beta2 = self._betas
        correction1, correction2 = 1 - beta1**self._updates, 1 - beta2**self._updates
        for prototype, moment, square in zip(self._prototypes, self._moments, self._squares, strict=True):
            gradient, prototype.grad = prototype.grad, None
            assert gradient is not None  # of the call before
            moment.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (square / correction2).sqrt_().add_(self._adam_eps)
            prototype.mul_(1 - lr * self._weight_decay).addcdiv_(moment, denominator, value=-lr / correction1)

    def replicated_state(self) -> dict[str, Tensor]:
        return {**super().replicated_state(), "updates": torch.tensor(self._updates)}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_replicated_state(state)
        self._updates = int(state["updates"])

    def row_tables(self) -> dict[str, RowTable]:
        (name, table), *_ = super().row_tables().items()
        tensors = dict(table.tensors)
        for side, moment, square in zip(("w1", "w2"), self._moments, self._squares, strict=True):
            tensors |= {f"{side}_moment": moment, f"{side}_square": square}
        return {name: table._replace(tensors=tensors)}
