"""Code shared by the networks that predict normalizers: a bound on the ratio of target to prediction, and gradients.

In the encoders' gradient, an anchor's negatives are weighted by the ratio q_i = (eps + g_i)/(eps + ghat_i), or by
C_i/lambda_i in AmorLIP. With a moving average, the ratio is at most 1/gamma; with a network, it is unbounded.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from neuclip_ds.losses.base import LossContext
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.global_contrastive import NormalizerEstimator, NormalizerOutput
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.losses.pairs import IMAGE, TEXT


def representable(log_estimate: Tensor, log_target: Tensor) -> Tensor:
    """Return the log estimates, raised where a sum of squared ratios target/estimate would overflow the dtype.

    Norms and optimizers square gradients. In float32, the bound keeps the ratio below 3e15; with an unfitted network
    and tau <= 0.03, the ratio could be larger. Callers still use the original estimate's derivatives. NaNs are kept.
    """
    return torch.maximum(log_estimate, log_target - 0.4 * math.log(torch.finfo(log_estimate.dtype).max))


def partner_gradient(batch: GatheredFeatures, weight: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of -1/B sum_i (weight1_i + weight2_i) s_ii/tau with respect to this rank's features.

    Args:
        batch: the gathered features.
        weight: (2, local) weights, held constant.
        tau: 0-dim temperature.

    Returns:
        (local, d) gradients for the images and for the texts; each row is a multiple of the paired feature.
    """
    pull = weight.sum(dim=0).div(-batch.size * tau).unsqueeze(1)
    return pull * batch.text[batch.local], pull * batch.image[batch.local]


def prediction_gradient(
    residual: Tensor, prototype_sums: Tensor, mass: Tensor, batch: GatheredFeatures, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of 1/B sum_i residual_i alpha_i, summed over both directions, with residuals held constant.

    With alpha_i = log(eps + sum_k c_k exp(z_ik)), z_ik = (cos(e_i, W_k) - s_ii)/tau and
    p_ik = c_k exp(z_ik - alpha_i), the derivatives with respect to an anchor e_i and its partner t_i are

        tau dalpha_i/de_i = sum_k p_ik W_k/|W_k| - t_i sum_k p_ik,   tau dalpha_i/dt_i = -e_i sum_k p_ik

    Args:
        residual: (2, local) residuals of this rank's anchors.
        prototype_sums: (2, local, d) sum_k p_ik W_k/|W_k|.
        mass: (2, local) sum_k p_ik.
        batch: the gathered features.
        tau: 0-dim temperature.

    Returns:
        (local, d) gradients for the images and for the texts.
    """
    image, text = partner_gradient(batch, residual * mass, tau)  # alpha_i decreases with s_ii in both directions
    weight = residual.unsqueeze(2) / (batch.size * tau)
    return image + weight[IMAGE] * prototype_sums[IMAGE], text + weight[TEXT] * prototype_sums[TEXT]


FullGradient = Callable[[Tensor], tuple[tuple[Tensor, Tensor], Tensor]]
"""Function from (2, local) r_i to (local, d) r_i/B grad alpha_i for images and texts, and (2, local) r_i tau
dalpha_i/dtau."""


class NetworkEstimator(NormalizerEstimator):
    """Base class of estimators whose network predicts alpha_i, where w_i = exp(-alpha_i) as in neuclip.py.

    Args:
        config: the options of the loss.
        context: sizes and settings of the run.
        eps: the constant in alpha_i.
    """

    def __init__(self, config: ObjectiveConfig, context: LossContext, eps: float) -> None:
        self._config = config.npn
        self._eps = eps
        self._communicator = context.communicator

    def _output(
        self, alpha: Tensor, log_target: Tensor, batch: GatheredFeatures, tau: Tensor, full_gradient: FullGradient
    ) -> NormalizerOutput:
        """Return w_i = exp(-alpha_i) and the part of r_i grad alpha_i that `alpha_grad` selects (NeuCLIP eq. 12).

        `alpha` and `log_target`, which is log(eps + g_i), have the shape (2, B).
        """
        metrics = fit_metrics(alpha, log_target)
        alpha = representable(alpha, log_target)
        metrics["alpha"] = alpha.mean()
        ratio = (log_target - alpha)[:, batch.local].exp()  # exp(-alpha_i) (eps + g_i) = 1 - r_i
        value = ratio + alpha[:, batch.local] - 1  # the bracket in J, which also appears in dJ/dtau
        if self._config.alpha_grad == "stop":
            return NormalizerOutput(log_weight=-alpha, value=value, metrics=metrics)
        if self._config.alpha_grad == "positive":
            feature_grad = partner_gradient(batch, 1 - ratio, tau)
            grad_tau = (1 - ratio) * (batch.positive[batch.local] / tau)
        else:
            feature_grad, grad_tau = full_gradient(1 - ratio)
        return NormalizerOutput(
            log_weight=-alpha, value=value, tau_term=value + grad_tau, metrics=metrics, feature_grad=feature_grad
        )


def fit_metrics(alpha: Tensor, log_target: Tensor) -> dict[str, Tensor]:
    """Return the mean and the largest of the ratios (eps + g_i)/(eps + ghat_i), which are 1 for an exact prediction.

    Args:
        alpha: (2, B) log(eps + ghat_i).
        log_target: (2, B) log(eps + g_i).
    """
    ratios = (log_target - representable(alpha, log_target)).exp()
    return {"npn_ratio_mean": ratios.mean(), "npn_ratio_max": ratios.max()}


def batch_output(log_target: Tensor, local_log_target: Tensor) -> NormalizerOutput:
    """Return the output before the first fit, with log(eps + g_i) in place of alpha_i.

    Args:
        log_target: (2, B) log(eps + g_i) of all anchors.
        local_log_target: (2, local) log(eps + g_i) of this rank's anchors.
    """
    return NormalizerOutput(
        log_weight=-log_target,
        value=local_log_target,
        metrics={"alpha": log_target.mean()},
    )
