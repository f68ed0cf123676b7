"""The ratio of an anchor's normaliser in the batch to its estimate, bounded, and the pull along the anchor's partner.

The encoders' gradient weighs an anchor's negatives by the ratio q_i = (eps + g_i)/(eps + ghat_i), C_i/lambda_i in
AmorLIP. A moving average bounds it by 1/gamma; a network does not. Raising the estimate by a constant of the anchor,

    alpha'_i = alpha_i + max(0, log q_i - log bound),   exp(-alpha'_i) (eps + g_i) = min(q_i, bound),

bounds it, and leaves the derivatives of alpha_i as they are.
"""

import math

import torch
from torch import Tensor

from neuclip_ds.objectives.gather import GatheredFeatures


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
