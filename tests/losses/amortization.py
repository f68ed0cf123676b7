"""Reference code for AmorLIP: the specified net built from torch layers, and the partition function written out."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from build import NO_MOMENTUM, build_loss, replicated_state
from torch import Tensor, nn

from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.losses.amortization_mlp import AmortizationMlp

DIM = 6
TAU = 0.07
MLP = AmortizationMlp(DIM, DIM)
EXACT = 1e-10
UNCLIPPED = 1e30


def amorlip(
    tau: float = TAU,
    rho: float | list[float] = 0.0,
    dtype: torch.dtype = torch.float64,
    common: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> ContrastiveLoss:
    """Build AmorLIP with `common` as options of objective and `options` as options of objective.amortized."""
    temperature = {"initial": tau, "rho": rho, "lr": 0.0}
    return build_loss(
        "amorlip", dim=DIM, dtype=dtype, betas=NO_MOMENTUM, amortized=options, temperature=temperature, **common
    )


class Net(nn.Module):
    """The specified net for one direction (0: images, 1: texts), built from torch layers."""

    def __init__(self, flat: Tensor, direction: int) -> None:
        super().__init__()
        w = MLP.weights(flat)
        self.up = nn.Linear(DIM, DIM)
        self.norm1 = nn.LayerNorm(DIM)
        self.down = nn.Linear(DIM, DIM)
        self.norm2 = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, 1)
        layers = ((self.up, w.up, w.up_bias), (self.down, w.down, w.down_bias), (self.out, w.out, w.out_bias))
        for layer, matrix, bias in layers:
            layer.weight.data = matrix[direction].T.clone()
            layer.bias.data = bias[direction, 0].clone()
        for norm, gain, shift in ((self.norm1, w.up_gain, w.up_shift), (self.norm2, w.down_gain, w.down_shift)):
            norm.weight.data = gain[direction, 0].clone()
            norm.bias.data = shift[direction, 0].clone()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(torch.relu(self.up(x)))
        output: Tensor = self.out(torch.relu(self.norm2(torch.relu(self.down(hidden))) + x))
        return output.squeeze(1)


def predict(flat: Tensor, image: Tensor, text: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([Net(flat, direction)(x.detach()) for direction, x in enumerate((image, text))])


def net_of(loss_fn: ContrastiveLoss, name: str) -> Tensor:
    return replicated_state(loss_fn)[f"normalizer.{name}"]


def log_partition(image: Tensor, text: Tensor, tau: float, c: float) -> Tensor:
    """Return log C, of shape (2, B), where C is the partition function with weight c for the positives."""
    with torch.no_grad():
        scores = image @ text.T / tau
        weight = (1 + (c - 1) * torch.eye(len(image)).to(image)) / (len(image) - 1)
        return torch.stack([(weight * x.exp()).sum(1).log() for x in (scores, scores.T)])
