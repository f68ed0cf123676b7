"""Reference code for AmorLIP: the specified net built from torch layers, and the partition function written out."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from build import objective
from neuclip_ds.objectives.normalizers.amortization_mlp import AmortizationMlp
from torch import Tensor, nn

from neuclip_ds.distributed.communicator import Communicator

DIM, TAU = 6, 0.07
MLP = AmortizationMlp(DIM, DIM)
EXACT = 1e-10
UNCLIPPED = 1e30


def amorlip(
    tau: float = TAU,
    rho: float | list[float] = 0.0,
    dtype: torch.dtype = torch.float64,
    common: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """Build AmorLIP with `common` as options of objective and `options` as options of objective.amortized."""
    temperature = {"initial": tau, "rho": rho, "lr": 0.0}
    return objective("amorlip", Communicator(), DIM, dtype, amortized=options, temperature=temperature, **common)


class Net(nn.Module):
    """The specified net for one direction (side 0: images, side 1: texts), built from torch layers."""

    def __init__(self, flat: Tensor, side: int) -> None:
        super().__init__()
        w = MLP.weights(flat)
        self.up, self.down, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        layers = ((self.up, w.up, w.up_bias), (self.down, w.down, w.down_bias), (self.out, w.out, w.out_bias))
        for layer, matrix, bias in layers:
            layer.weight.data, layer.bias.data = matrix[side].T.clone(), bias[side, 0].clone()
        norms = ((self.norm1, w.up_gain, w.up_shift), (self.norm2, w.down_gain, w.down_shift))
        for norm, gain, shift in norms:
            norm.weight.data, norm.bias.data = gain[side, 0].clone(), shift[side, 0].clone()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(torch.relu(self.up(x)))
        return self.out(torch.relu(self.norm2(torch.relu(self.down(hidden))) + x)).squeeze(1)


def predict(flat: Tensor, image: Tensor, text: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([Net(flat, side)(x.detach()) for side, x in enumerate((image, text))])


def net_of(method: Any, name: str) -> Tensor:
    return method.replicated_state()[f"normalizer.{name}"].clone()


def log_partition(image: Tensor, text: Tensor, tau: float, c: float) -> Tensor:
    """Return log C, of shape (2, B), where C is the partition function with weight c for the positives."""
    with torch.no_grad():
        scores = image @ text.T / tau
        weight = (1 + (c - 1) * torch.eye(len(image)).to(image)) / (len(image) - 1)
        return torch.stack([(weight * x.exp()).sum(1).log() for x in (scores, scores.T)])
