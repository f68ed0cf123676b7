"""NeuCLIP's ablation that predicts the normalizer with an MLP instead of prototypes (NeuCLIP section 5.2).

    alpha_i = log(eps + exp(f(e_i) - s_ii / tau)),   f: the amortization MLP of AmorLIP, one for each direction

f is trained with Adam on the same objective as the prototypes. The output bias is initialized so that predictions match
the first batch on average. Each rank computes the gradient of its local rows, and gradients are summed over ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from neuclip_ds.losses.amortization_mlp import AmortizationMlp
from neuclip_ds.losses.arithmetic import leaf_of, log_eps_plus
from neuclip_ds.losses.base import LossContext, Position, adam_state, load_adam_state
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.global_contrastive import NormalizerOutput
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.prediction import NetworkEstimator, batch_output, partner_gradient, representable

_SEED = 0


class MlpEstimator(NetworkEstimator):
    """Estimator w_i = exp(-alpha_i), as in neuclip.py, except that an MLP predicts alpha_i."""

    def __init__(self, config: ObjectiveConfig, context: LossContext, eps: float) -> None:
        super().__init__(config, context, eps)
        self._mlp = AmortizationMlp(context.dim, context.dim)
        weights = self._mlp.draw(_SEED).to(dtype=context.dtype, device=context.communicator.device)
        self._weights = Parameter(weights)
        self._adam = torch.optim.Adam(
            [self._weights], lr=self._config.rate, weight_decay=self._config.weight_decay, fused=True
        )
        self._started = False

    def __call__(
        self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor, position: Position, training: bool
    ) -> NormalizerOutput:
        log_target = log_eps_plus(log_g, self._eps)  # log(eps + g), (2, local)
        features, positive = self._inputs(batch, tau)
        if training and not self._started:
            self._start(features, positive, log_target, batch.size)
        if not self._started:
            return batch_output(batch.gather(log_target, "normalizer"), log_target)

        if training:
            self._fit(features, positive, log_target, tau, batch.size)

        # the same output as in neuclip.py, except that each rank computes its anchors' gradients locally
        log_ghat = self._log_ghat(features, positive)
        predicted = log_eps_plus(log_ghat, self._eps)

        def full_gradient(residual: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            residual = residual * (log_ghat - predicted).exp()  # dalpha_i = ghat_i/(eps + ghat_i) (df - ds_ii/tau)
            image, text = partner_gradient(batch, residual, tau)
            image_of_f, text_of_f = self._gradient_of_f(features, residual / batch.size)
            return (image + image_of_f, text + text_of_f), residual * positive

        alpha, all_targets = batch.gather(torch.cat([predicted, log_target]), "normalizer").split(2)
        return self._output(alpha, all_targets, batch, tau, full_gradient)

    def log_estimate(self, batch: GatheredFeatures, log_g: Tensor, tau: Tensor) -> Tensor:
        if not self._started:
            return log_g
        features, positive = self._inputs(batch, tau)
        return self._log_ghat(features, positive)

    def _start(self, features: Tensor, positive: Tensor, log_target: Tensor, size: int) -> None:
        """Set the output bias so that predictions match the first batch on average."""
        weights = self._weights.detach()
        gap = (log_target + positive - self._mlp(weights, features)).sum(dim=1)
        self._mlp.raise_level(weights, self._communicator.all_reduce(gap, "normalizer") / size)
        self._started = True

    def _inputs(self, batch: GatheredFeatures, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (2, local, d) features and the (local,) s_ii/tau of this rank's anchors."""
        return batch.anchors(), batch.positive[batch.local] / tau

    def _log_ghat(self, features: Tensor, positive: Tensor) -> Tensor:
        """Return (2, local) log ghat_i = f(e_i) - s_ii/tau."""
        return self._mlp(self._weights.detach(), features) - positive

    def _gradient_of_f(self, features: Tensor, weight: Tensor) -> Tensor:
        """Return the (2, local, d) gradient of sum_i weight_i f(e_i) with respect to the features."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = leaf_of(features)
            total = self._mlp(self._weights.detach(), leaf)
            return torch.autograd.grad(total, leaf, weight.clone())[0]

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
        state = {"weights": self._weights.detach(), "started": torch.tensor(self._started, device="cpu")}
        return state | adam_state(self._adam, self._weights)

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        self._weights.data.copy_(state["weights"])
        self._started = bool(state["started"])
        load_adam_state(self._adam, self._weights, state)
