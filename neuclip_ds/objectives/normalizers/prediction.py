"""What predictions of an anchor's normalizer share: their ratio to the batch's, bounded and watched, and gradients.

The encoders' gradient weighs an anchor's negatives by the ratio q_i = (eps + g_i)/(eps + ghat_i), C_i/lambda_i in
AmorLIP. A moving average bounds it by 1/gamma; a network does not. Raising the estimate by a constant of the anchor,

    alpha'_i = alpha_i + max(0, log q_i - log bound),   exp(-alpha'_i) (eps + g_i) = min(q_i, bound),

bounds it, and leaves the derivatives of alpha_i as they are.
"""

import logging
import math

import torch
from torch import Tensor

from neuclip_ds.objectives.base import Step
from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.pair_grid import IMAGE, TEXT

log = logging.getLogger(__name__)

_LOST = 2.0  # mean of (eps + g)/(eps + ghat), or its inverse; 1 at the optimum
_FOUND = 1.5  # well inside, so that a mean at the limit does not log again and again


def log_eps_plus(log_x: Tensor, eps: float) -> Tensor:
    """Return log(eps + x)."""
    return torch.logaddexp(log_x, log_x.new_full((), math.log(eps)))


def representable(log_estimate: Tensor, log_target: Tensor) -> Tensor:
    """Return the estimates, raised where sums of squares of the ratio target/estimate would overflow their dtype.

    Norms and optimizers square gradients. In float32 the ratio stays below 3e15, which a network without a fit exceeds
    from tau = 0.03 down.
    """
    return bounded(log_estimate, log_target, 0.4 * math.log(torch.finfo(log_estimate.dtype).max))


def bounded(log_estimate: Tensor, log_target: Tensor, log_bound: float) -> Tensor:
    """Return the log estimates, raised where log(target/estimate) would exceed `log_bound`; a NaN stays one."""
    return torch.maximum(log_estimate, log_target - log_bound)


def partner_gradient(batch: GatheredFeatures, weight: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of -1/B sum_i (weight1_i + weight2_i) s_ii/tau by this rank's rows.

    Args:
        batch: the gathered features.
        weight: (2, local), held constant.
        tau: 0-dim.

    Returns:
        (local, d) by images, along their texts, and (local, d) by texts.
    """
    pull = weight.sum(dim=0).div(-batch.size * tau).unsqueeze(1)
    return pull * batch.text[batch.local], pull * batch.image[batch.local]


def prediction_gradient(
    residual: Tensor, drawn: Tensor, mass: Tensor, batch: GatheredFeatures, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of 1/B sum_i residual_i alpha_i over both directions, residual held constant.

    With alpha_i = log(eps + sum_k c_k exp(z_ik)), z_ik = (cos(e_i, W_k) - s_ii)/tau and
    p_ik = c_k exp(z_ik - alpha_i), an anchor e_i and its partner t_i have

        tau dalpha_i/de_i = sum_k p_ik W_k/|W_k| - t_i sum_k p_ik,   tau dalpha_i/dt_i = -e_i sum_k p_ik

    Args:
        residual: (2, local) of this rank's anchors.
        drawn: (2, local, d) sum_k p_ik W_k/|W_k|.
        mass: (2, local) sum_k p_ik.
        batch: the gathered features.
        tau: 0-dim.

    Returns:
        (local, d) for images and for texts.
    """
    image, text = partner_gradient(batch, residual * mass, tau)  # both directions' alpha_i fall with s_ii
    weight = residual.unsqueeze(2) / (batch.size * tau)
    return image + weight[IMAGE] * drawn[IMAGE], text + weight[TEXT] * drawn[TEXT]


class NpnHealth:
    """Logs once when the prediction loses the normalizer, and again when it has recovered, as steps with logs show."""

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._healthy = True

    def watch(self, ratio: Tensor, step: Step) -> dict[str, Tensor]:
        """Return metrics of the (2, B) ratios (eps + g)/(eps + ghat); log a change of health in a step that logs."""
        metrics = {"npn_ratio_mean": ratio.mean(), "npn_ratio_max": ratio.max()}
        if step.logs:
            self._report(float(metrics["npn_ratio_mean"]), step)
        return metrics

    def _report(self, mean: float, step: Step) -> None:
        off = max(mean, 1 / mean) if mean > 0 else float("inf")
        if math.isnan(mean):
            pass  # the step is skipped, for another reason
        elif self._healthy and not off <= _LOST:
            log.warning(
                "step %d: the NPN has lost the normalizer: the mean of (eps + g)/(eps + ghat) is %.3g, outside "
                "[0.5, 2]; if it stays there, lower objective.npn.lr (now %g) or objective.npn.redraw_every",
                step.number, mean, self._lr,
            )  # fmt: skip
            self._healthy = False
        elif not self._healthy and off <= _FOUND:
            log.info("step %d: the NPN follows the batch normalizer again (mean ratio %.3g)", step.number, mean)
            self._healthy = True
