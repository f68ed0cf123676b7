"""Options and published settings of NeuCLIP; the equations are in neuclip.py."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from neuclip_ds.losses.method import Method
from neuclip_ds.section import Section

_LR = {"scaled": 0.3, "adagrad": 1.0}  # default step size of an update, by optimizer
_MLP_LR = 1e-3  # with network=mlp


class NpnConfig(Section):
    prototypes: int = Field(4096, ge=1, le=1 << 24)
    """Number of prototypes m per direction."""
    network: Literal["prototypes", "mlp"] = "prototypes"
    """Form of the network: prototypes (NeuCLIP eq. 10), or AmorLIP's MLP trained on the same objective (ablation)."""
    optimizer: Literal["scaled", "adagrad"] = "scaled"
    """Update of the prototypes: AdaGrad (NeuCLIP), or `scaled` (this project), whose steps change no logit by more than
    about lr at any batch size. At low temperatures, `scaled` amplifies rounding errors far less than AdaGrad. Not used
    with network=mlp (Adam) or order=joint (AdamW)."""
    inner_steps: int = Field(10, ge=0)
    """Number of updates T_u per training step."""
    redraw_every: int = Field(500, ge=0)
    """Interval T_r, in units of `redraw_unit`, between redraws of the prototypes from recent features; 0 draws them
    only once, as order=joint does."""
    redraw_unit: Literal["steps", "samples"] = "steps"
    """Unit of `redraw_every`: `steps` (NeuCLIP), or `samples` (this project), with which one value suits all batch
    sizes."""
    kappa: float | None = Field(None, gt=0, le=1e6)
    """Weight of the predicted normalizer relative to the batch's own, whose weight is 1 (this project). By default, the
    prediction is used alone (NeuCLIP)."""
    lr: float | None = Field(None, gt=0)
    """Step size of an update. By default, 0.3 for `scaled`, 1e-3 for the Adam of network=mlp, and 1.0 for AdaGrad. The
    value 1.0 is published for B >= 1024 and m = 4096; use a lower value for smaller batches. order=joint uses the
    encoders' learning rate instead."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of the network: coupled with the gradient in AdaGrad and in the MLP's Adam, decoupled with
    order=joint. NeuCLIP searched values from 0 to 1 and uses 0; optimizer=scaled has no weight decay."""
    alpha_grad: Literal["full", "positive", "stop"] = "full"
    """Part of the gradient of alpha, the predicted log normalizer, that the encoders and tau receive: all of it
    (`full`, NeuCLIP eq. 12), only the part from the similarity of the positive pair (`positive`), or none (`stop`)."""
    objective: Literal["unified", "separate"] = "unified"
    """Objective of the network: NeuCLIP's loss (`unified`), or (alpha - log(eps + g))^2 (`separate`, ablation)."""
    replicas: int | None = Field(None, ge=1)
    """Maximum number of ranks that store and fit the same prototypes: by default 4, or 8 on 64 or more ranks. The run
    uses the largest divisor of the world size up to this number. With more replicas, alpha_grad=full sends less and
    each rank computes more; other values of alpha_grad use one replica."""
    order: Literal["alternating", "joint"] = "alternating"
    """Order of the updates: `alternating` updates the network, and then the encoders with the new prediction (Algorithm
    1); `joint` updates both from the old prediction, and the network takes one AdamW step at the encoders' lr, without
    redraws (Algorithm 3)."""

    @model_validator(mode="after")
    def _order_fits_the_network(self) -> NpnConfig:
        if self.order == "joint" and self.network == "mlp":
            raise ValueError("order=joint needs network=prototypes; set order=alternating or network=prototypes")
        is_scaled = self.optimizer == "scaled" and self.network == "prototypes" and self.order != "joint"
        if is_scaled and self.weight_decay:
            raise ValueError("optimizer=scaled has no weight decay; omit weight_decay, or set optimizer=adagrad")
        return self

    @model_validator(mode="after")
    def _kappa_fits_the_network(self) -> NpnConfig:
        if self.kappa is not None and self.network == "mlp":
            raise ValueError("kappa needs network=prototypes; omit kappa, or set network=prototypes")
        if self.kappa is not None and self.alpha_grad != "full":
            raise ValueError(
                f"kappa has its own gradient, so alpha_grad={self.alpha_grad} has no effect; omit kappa or alpha_grad"
            )
        return self

    @model_validator(mode="after")
    def _choose_lr(self) -> NpnConfig:
        if self.lr is None:
            self.lr = _MLP_LR if self.network == "mlp" else _LR[self.optimizer]
        return self

    @property
    def rate(self) -> float:
        """Step size of an update."""
        assert self.lr is not None  # set by the validator
        return self.lr

    def replicas_on(self, world_size: int) -> int:
        """Return the number of replicas of each prototype; more than one is useful only with alpha_grad=full."""
        if self.alpha_grad != "full":
            return 1
        most = self.replicas
        if most is None:
            most = 4 if world_size < 64 else 8
        return max(count for count in range(1, most + 1) if world_size % count == 0)


# Tau's initial value and schedule are not published. We use 0.07, and the encoders' schedule because tau's learning
# rate (NeuCLIP Table 3) is an eighth of the encoders' on every dataset.
METHODS = {
    "neuclip": Method(
        builder="neuclip.neuclip",
        sections=("npn",),
        state_options=("npn.network", "npn.order", "npn.optimizer", "npn.prototypes"),
        defaults={"temperature": {"initial": 0.07, "rule": "robust"}},
        has_temperature_rule=True,
        refuses_reference=True,
    ),
}
