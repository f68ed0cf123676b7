"""Options and published settings of AmorLIP; the equations are in amorlip.py."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from neuclip_ds.losses.method import Method
from neuclip_ds.section import Section


class AmortizedConfig(Section):
    width: float = Field(1.0, gt=0)
    """Hidden units of the amortization MLP, as a multiple f_d of the feature width."""
    loss: Literal["l2_log", "kl", "js"] = "l2_log"
    """Loss for fitting lambda: the squared error of the logarithms, or the KL or Jensen-Shannon divergence plus a tenth
    of the squared error."""
    amortizes: Literal["partition", "negatives"] = "partition"
    """Quantity that the nets predict: the partition function (`partition`), or only its sum over negatives
    (`negatives`), to which each anchor's positive term is then added (AmorLIP Table 3)."""
    gather: Literal["every_step", "fits"] = "every_step"
    """Steps that gather the features of all ranks: every step, or only steps that fit the nets (`fits`). In the other
    steps, each rank contrasts only its local rows (AmorLIP section 3.3)."""
    lr: float = Field(1e-3, gt=0)
    """Adam learning rate for the MLPs (the released code multiplies it by the number of ranks)."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm of the MLPs; 0 disables clipping."""
    inner_steps: int = Field(3, ge=0)
    """Adam steps T_lambda per fit of the nets."""
    online_every: int = Field(1, ge=1)
    """Interval T_online between fits of the online nets, in training steps."""
    target_every: int = Field(2, ge=1)
    """Interval T_target between updates of the EMA target nets, in training steps."""
    ema: float = Field(0.999, ge=0, le=1)
    """Decay alpha of the target nets' EMA."""
    previous_weight: float = Field(0.8, ge=0, lt=1)
    """Largest weight beta_T of the previous epoch's prediction in the values to which the nets are fitted."""
    previous_epochs: float = Field(16, ge=0)
    """Epochs over which beta rises to `previous_weight` along a cosine: all epochs in the paper, 16 of 33 in the
    README of the released code."""
    positive_weight: float = Field(1.0, ge=0)
    """Weight c of the positive pair in the partition function: 1 in the paper, 1e-3 in the released scripts."""
    encoder_normalizer: Literal["ema", "combined"] = "ema"
    """Normalizer of the encoders' loss: the prediction of the EMA target net (`ema`, paper), or the target to which the
    nets are fitted (`combined`, released code)."""


# The schedule of tau and previous_epochs=16 are from the README's script, and gather=every_step is from the released
# code; the other settings that the paper publishes are the paper's. The script also sets positive_weight=1e-3 and
# encoder_normalizer=combined.
METHODS = {
    "amorlip": Method(
        builder="amorlip.amorlip",
        sections=("amortized", "epoch_steps"),
        state_options=("amortized.width",),
        defaults={"temperature": {"initial": 0.07, "schedule": "third_below_0.03"}},
        refuses_reference=True,
    ),
}
