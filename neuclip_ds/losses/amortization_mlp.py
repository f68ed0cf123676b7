"""AmorLIP's amortization networks, one for images and one for texts: they predict log lambda from a feature.

    x -> Linear(d, h) -> ReLU -> LayerNorm -> Linear(h, d) -> ReLU -> LayerNorm -> + x -> ReLU -> Linear(d, 1)

The paper specifies a "three-layer MLP"; the residual connection and LayerNorm are from the released code. The weights
of both nets are views of one flat vector, so copying, averaging, clipping and an Adam step take one operation each.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Views of a flat weight vector; the first dimension is the direction, 0 for images and 1 for texts."""

    up: Tensor  # (2, d, h)
    up_bias: Tensor  # (2, 1, h)
    up_gain: Tensor  # (2, 1, h), of the LayerNorm after the layer
    up_shift: Tensor  # (2, 1, h)
    down: Tensor  # (2, h, d)
    down_bias: Tensor  # (2, 1, d)
    down_gain: Tensor  # (2, 1, d)
    down_shift: Tensor  # (2, 1, d)
    out: Tensor  # (2, d, 1)
    out_bias: Tensor  # (2, 1, 1)


class AmortizationMlp:
    """Architecture of the networks; each call takes the weights as an argument.

    Attributes:
        size: length of the flat vector of weights.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        self._dim = dim
        self._hidden = hidden
        self._shapes = {
            "up": (2, dim, hidden),
            "up_bias": (2, 1, hidden),
            "up_gain": (2, 1, hidden),
            "up_shift": (2, 1, hidden),
            "down": (2, hidden, dim),
            "down_bias": (2, 1, dim),
            "down_gain": (2, 1, dim),
            "down_shift": (2, 1, dim),
            "out": (2, dim, 1),
            "out_bias": (2, 1, 1),
        }
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self.size = sum(self._sizes)

    def weights(self, flat: Tensor) -> Weights:
        """Return the weights as views of a (size,) vector."""
        views: dict[str, Tensor] = {}
        for part, (name, shape) in zip(flat.split(self._sizes), self._shapes.items(), strict=True):
            views[name] = part.view(shape)
        return Weights(**views)

    def draw(self, seed: int) -> Tensor:
        """Return (size,) float32 weights on the CPU, initialized like torch's layers but with a separate generator."""
        generator = torch.Generator().manual_seed(seed)
        flat = torch.empty(self.size, dtype=torch.float32, device="cpu")
        w = self.weights(flat)
        for matrix, bias, inputs in (
            (w.up, w.up_bias, self._dim),
            (w.down, w.down_bias, self._hidden),
            (w.out, w.out_bias, self._dim),
        ):
            bound = inputs**-0.5
            matrix.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        for gain in (w.up_gain, w.down_gain):
            gain.fill_(1.0)
        for shift in (w.up_shift, w.down_shift):
            shift.fill_(0.0)
        return flat

    def raise_level(self, flat: Tensor, by: Tensor) -> None:
        """Add a constant to each net's output; `by`, of shape (2,), contains one constant per direction."""
        self.weights(flat).out_bias.add_(by.view(2, 1, 1))

    def __call__(self, flat: Tensor, features: Tensor) -> Tensor:
        """Return (2, rows) log lambda for (2, rows, d) image and text features."""
        w = self.weights(flat)
        x = torch.baddbmm(w.up_bias, features, w.up).relu_()
        x = layer_norm(x, x.shape[2:])
        # the gain and the shift are folded into the next layer's weights, which saves a pass over the rows
        down_bias = torch.baddbmm(w.down_bias, w.up_shift, w.down)
        x = torch.baddbmm(down_bias, x, w.up_gain.mT * w.down).relu_()
        x = layer_norm(x, x.shape[2:])
        x = torch.addcmul(features + w.down_shift, x, w.down_gain).relu_()
        return (x * w.out.mT).sum(dim=2) + w.out_bias.squeeze(2)
