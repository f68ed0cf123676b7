"""Our losses and gradients equal those of open_clip_torch, an optional package (`pip install open_clip_torch`).

In float32 at usual temperatures, the relative difference is below 1e-6. At tau = 0.01, exponents reach 100 and float32
is less accurate: there, our error relative to open_clip in float64 is at most twice the error of open_clip in float32.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from build import NO_MOMENTUM, build_loss, call, pairs, relative_error, scalar_gradients
from torch import Tensor

open_clip_losses = pytest.importorskip("open_clip.loss")
ROWS = 64
DIM = 32


def open_clip_results(loss_of: Callable[..., Tensor], dtype: torch.dtype, scalars: Sequence[float]) -> list[Tensor]:
    """Return open_clip's loss and its gradients for the image features, the text features and the scalars."""
    leaves = [x.to(dtype).requires_grad_() for x in pairs(ROWS, DIM)]
    leaves += [torch.tensor(x, dtype=dtype, requires_grad=True) for x in scalars]
    loss = loss_of(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("tau", [0.1, 0.07, 0.03, 0.01])
@pytest.mark.parametrize(
    ("method", "loss_class", "bias"), [("openclip", "ClipLoss", []), ("siglip", "SigLipLoss", [-10.0])]
)
def test_losses_and_gradients_equal_those_of_open_clip(
    method: str, loss_class: str, bias: list[float], tau: float
) -> None:
    loss_of = getattr(open_clip_losses, loss_class)()
    single = open_clip_results(loss_of, torch.float32, [1 / tau, *bias])
    double = open_clip_results(loss_of, torch.float64, [1 / tau, *bias])

    loss_fn = build_loss(
        method, dim=DIM, dtype=torch.float32, betas=NO_MOMENTUM, temperature={"initial": tau, "lr": 0.0}
    )
    image, text = (x.float() for x in pairs(ROWS, DIM))
    result = call(loss_fn, image, text)
    scalars = scalar_gradients(loss_fn)
    scalars["theta"] *= tau  # open_clip's gradient is for exp(theta)
    for value, near, exact in zip(
        [result.loss, result.image, result.text, *scalars.values()], single, double, strict=True
    ):
        error_of_open_clip = relative_error(near.double(), exact)
        assert relative_error(value.double(), exact) < max(1e-6, 2 * error_of_open_clip)
        assert relative_error(value, near) < max(1e-6, 3 * error_of_open_clip)
