"""NeuCLIP's ablation that predicts the normalizer with an MLP instead of prototypes (NeuCLIP section 5.2).

    alpha_i = log(eps + exp(f(e_i) - s_ii / tau)),   f: the amortization MLP of AmorLIP, one for each direction

f is trained with Adam on the same objective as the prototypes. The output bias is initialized so that predictions match
the first batch on average. Each rank computes the gradient of its local rows, and gradients are summed over ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.objectives.base import Context, NormalizerOutput, Step, adam_state, load_adam_state
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.normalizers.amortization_mlp import AmortizationMlp
from neuclip_ds.objectives.normalizers.prediction import (
    NetworkNormalizer,
    batch_output,
    partner_gradient,
    representable,
)
from neuclip_ds.objectives.options import ObjectiveConfig
from neuclip_ds.objectives.pair_arithmetic import log_eps_plus

_SEED = 0


class MlpNpnNormalizer(NetworkNormalizer):
    """Normalizer w_i = exp(-alpha_i) predicted by an MLP; npn.py differs only in the prediction and its gradient."""

    def __init__(self, config: ObjectiveConfig, eps: float, context: Context) -> None:
        super().__init__(config, eps, context)
        self._mlp = AmortizationMlp(context.dim, context.dim)
        flat = self._mlp.draw(_SEED).to(dtype=context.dtype, device=context.communicator.device)
        self._weights = Parameter(flat)
        self._adam = torch.optim.Adam(
            [self._weights], lr=config.npn.rate, weight_decay=config.npn.weight_decay, fused=True
        )
        self._started = False

    def __call__(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, step: Step) -> NormalizerOutput:
        log_target = log_eps_plus(log_g, self._eps)  # log(eps + g), (2, local)
        features, positive = self._inputs(batch, tau)
        if not self._started and step.learn:
            gap = (log_target + positive - self._mlp(self._weights.detach(), features)).sum(dim=1)
            self._mlp.raise_level(self._weights.detach(), self._communicator.all_reduce(gap, "normalizer") / batch.size)
            self._started = True
        if not self._started:
            return batch_output(batch.gather(log_target, "normalizer"), log_target)

        def estimate() -> NormalizerOutput:
            """Compute the same output as npn.py, except that each rank computes its anchors' gradients locally."""
            log_ghat = self._log_ghat(features, positive)
            predicted = log_eps_plus(log_ghat, self._eps)

            def full(residual: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
                residual = residual * (log_ghat - predicted).exp()  # dalpha_i = ghat_i/(eps + ghat_i) (df - ds_ii/tau)
                image, text = partner_gradient(batch, residual, tau)
                by_image, by_text = self._gradient_of_f(features, residual / batch.size)
                return (image + by_image, text + by_text), residual * positive

            alpha, all_targets = batch.gather(torch.cat([predicted, log_target]), "normalizer").split(2)
            return self._output(alpha, all_targets, batch, tau, full)

        return self._in_order(lambda: self._fit(features, positive, log_target, tau, batch.size), estimate, step)

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        return self._log_ghat(*self._inputs(batch, tau)) if self._started else log_g

    def _inputs(self, batch: GatheredFeatures, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (2, local, d) features and the (local,) s_ii/tau of this rank's anchors."""
        return batch.anchors(), batch.positive[batch.local] / tau

    def _log_ghat(self, features: Tensor, positive: Tensor) -> Tensor:
        """Return (2, local) log ghat_i = f(e_i) - s_ii/tau."""
        return self._mlp(self._weights.detach(), features) - positive

    def _gradient_of_f(self, features: Tensor, weight: Tensor) -> Tensor:
        """Return the (2, local, d) gradient of sum_i weight_i f(e_i) with respect to the features."""
        with torch.enable_grad():
            leaf = features.detach().requires_grad_()
            total = self._mlp(self._weights.detach(), leaf)
        return torch.autograd.grad(total, leaf, weight)[0]

    def _fit(self, features: Tensor, positive: Tensor, log_target: Tensor, tau: Tensor, size: int) -> None:
        """Take T_u Adam steps on tau/B sum_i [exp(-alpha_i)(eps + g_i) + alpha_i], or on the separate objective."""
        for _ in range(self._config.inner_steps):
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
            self._adam.step()

    def replicated_state(self) -> dict[str, Tensor]:
        state = {"weights": self._weights.detach(), "started": torch.tensor(self._started)}
        return state | adam_state(self._adam, self._weights)

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._weights.data.copy_(state["weights"])
        self._started = bool(state["started"])
        load_adam_state(self._adam, self._weights, state)
