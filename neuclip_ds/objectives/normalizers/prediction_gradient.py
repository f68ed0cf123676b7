"""Gradient of a prediction of log-normalisers from prototypes, for the anchors' features."""

from torch import Tensor

from neuclip_ds.objectives.gather import GatheredFeatures
from neuclip_ds.objectives.normalizers.anchor_ratio import partner_gradient
from neuclip_ds.objectives.pair_grid import IMAGE, TEXT


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
