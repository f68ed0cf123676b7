"""NeuCLIP's ablation of the network's form: an MLP instead of prototypes (NeuCLIP section 5.2).

    alpha_i = log(eps + exp(f(e_i) - s_ii / tau)),   f: the amortization MLP of AmorLIP, one for each direction

fitted to the same objective as the prototypes, by Adam. The last bias starts at the batch's mean, so that the first
predictions have the right level. Each rank fits the nets to its own rows; their gradient is summed over ranks.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.objectives.base import Context, Normalizer, NormalizerOutput, Step, adam_state, load_adam_state
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.normalizers.amortization_mlp import AmortizationMlp
from neuclip_ds.objectives.normalizers.prediction import (
    NpnHealth,
    bounded,
    log_eps_plus,
    partner_gradient,
    representable,
)
from neuclip_ds.objectives.options import NpnConfig

_SEED = 0


class MlpNpnNormalizer(Normalizer):
    """w_i = exp(-alpha_i); only f and its gradient differ from the prototypes' (npn.py)."""

    def __init__(self, config: NpnConfig, eps: float, context: Context) -> None:
        self._config, self._eps, self._own_optimizer = config, eps, context.own_optimizers
        self._communicator = context.communicator
        self._mlp = AmortizationMlp(context.dim, context.dim)
        flat = self._mlp.draw(_SEED).to(dtype=context.dtype, device=context.communicator.device)
        self._weights = Parameter(flat)
        self._adam = torch.optim.Adam(
            [self._weights], lr=self._config.mlp_lr, weight_decay=self._config.weight_decay, fused=True
        )
        self._started = False
        self._health = NpnHealth(self._config.mlp_lr)

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        log_target = log_eps_plus(log_g, self._eps)  # log(eps + g), (2, local)
        features, positive = self._inputs(batch, tau)
        if not self._started and step.learn:
            gap = (log_target + positive - self._mlp(self._weights.detach(), features)).sum(dim=1)
            level = self._communicator.all_reduce(gap, "normalizer") / batch.size
            self._mlp.weights(self._weights.detach()).out_bias.add_(level.view(2, 1, 1))
            self._started = True
        if step.learn and self._config.order == "alternating":
            self._fit(features, positive, log_target, tau, batch.size)
        if self._started:
            estimate = self._estimate(batch, features, positive, log_target, tau, step)
        else:
            alpha = batch.gather(log_target, "normalizer")
            estimate = NormalizerOutput(-alpha, log_target, log_target, {"alpha": alpha.mean()})
        if step.learn and self._config.order == "simultaneous":
            self._fit(features, positive, log_target, tau, batch.size)
        return estimate

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        if not self._started:
            return log_eps_plus(log_g, self._eps)
        return log_eps_plus(self._log_ghat(*self._inputs(batch, tau)), self._eps)

    def _inputs(self, batch: GatheredFeatures, tau: Tensor) -> tuple[Tensor, Tensor]:
        """(2, local, d) features and (local,) s_ii / tau."""
        image, text = batch.image[batch.local], batch.text[batch.local]
        return torch.stack([image, text]), torch.einsum("id,id->i", image, text) / tau

    def _log_ghat(self, features: Tensor, positive: Tensor) -> Tensor:
        """(2, local) f(e_i) - s_ii/tau."""
        return self._mlp(self._weights.detach(), features) - positive

    def _estimate(
        self, batch: GatheredFeatures, features: Tensor, positive: Tensor, log_target: Tensor, tau: Tensor, step: Step
    ) -> NormalizerOutput:
        """As for prototypes; a rank has its anchors' whole gradient, so that none travels."""
        log_ghat = self._log_ghat(features, positive)
        predicted = log_eps_plus(log_ghat, self._eps)
        raised = representable(predicted, log_target)
        alpha = raised
        if self._config.max_ratio is not None:
            alpha = bounded(alpha, log_target, math.log(self._config.max_ratio))
        all_alpha, all_ratio = batch.gather(torch.cat([alpha, (log_target - raised).exp()]), "normalizer").split(2)
        metrics = {**self._health.watch(all_ratio, step), "alpha": all_alpha.mean()}
        ratio = (log_target - alpha).exp()
        value = ratio + alpha - 1
        residual = 1 - ratio
        if self._config.alpha_grad == "stop":
            return NormalizerOutput(-all_alpha, value, value, metrics)
        if self._config.alpha_grad == "positive":
            feature_grad = partner_gradient(batch, residual, tau)
        else:
            residual = residual * (log_ghat - predicted).exp()  # dalpha_i = ghat_i/(eps + ghat_i) (df - ds_ii/tau)
            along_image, along_text = partner_gradient(batch, residual, tau)
            by_image, by_text = self._gradient_of_f(features, residual / batch.size)
            feature_grad = (along_image + by_image, along_text + by_text)
        return NormalizerOutput(-all_alpha, value, value + residual * positive, metrics, feature_grad)

    def _gradient_of_f(self, features: Tensor, weight: Tensor) -> Tensor:
        """(2, local, d) gradient of the sum of weight_i f(e_i) by the features; `weight` (2, local)."""
        with torch.enable_grad():
            leaf = features.detach().requires_grad_()
            total = self._mlp(self._weights.detach(), leaf)
        return torch.autograd.grad(total, leaf, weight)[0]

    def _fit(self, features: Tensor, positive: Tensor, log_target: Tensor, tau: Tensor, size: int) -> None:
        """T_u Adam steps on tau/B sum_i [exp(-alpha_i)(eps + g_i) + alpha_i], or on the separate objective."""
        for _ in range(self._config.inner_steps if self._own_optimizer else 1):
            with torch.enable_grad():
                log_normalizer = self._mlp(self._weights, features)
                alpha = log_eps_plus(log_normalizer - positive, self._eps)
            fitted = alpha.detach()
            if self._config.objective == "separate":
                grad_alpha = 2 * (fitted - log_target)
            else:
                grad_alpha = tau * (1 - (log_target - representable(fitted, log_target)).exp())
            (gradient,) = torch.autograd.grad(alpha, self._weights, grad_alpha / size)
            self._weights.grad = self._communicator.all_reduce(gradient, "network gradients")
            if self._own_optimizer:
                self._adam.step()

    def parameters(self) -> dict[str, Parameter]:
        return {"weights": self._weights}

    def replicated_state(self) -> dict[str, Tensor]:
        state = {"weights": self._weights.detach(), "started": torch.tensor(self._started)}
        return state | adam_state(self._adam, self._weights)

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._weights.data.copy_(state["weights"])
        self._started = bool(state["started"])
        load_adam_state(self._adam, self._weights, state)
