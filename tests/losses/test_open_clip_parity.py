"""Our losses and gradients equal those of open_clip_torch, an optional package (`pip install open_clip_torch`).

In float32 at usual temperatures, the relative difference is below 1e-6. At tau = 0.01, exponents reach 100 and float32
is less accurate: there, our error relative to open_clip in float64 is at most twice the error of open_clip in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from build import batch, objective, pairs, relative_error, step, with_scalar_gradients
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator

peer = pytest.importorskip("open_clip.loss")
ROWS, DIM = 64, 32


def theirs(loss_of: Callable[..., Tensor], dtype: torch.dtype, scalars: Sequence[float]) -> list[Tensor]:
    """Return open_clip's loss and its gradients for the image features, the text features and the scalars."""
    leaves = [x.to(dtype).requires_grad_() for x in pairs(ROWS, DIM)]
    leaves += [torch.tensor(x, dtype=dtype, requires_grad=True) for x in scalars]
    loss = loss_of(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def ours(method: Any) -> list[Tensor]:
    """Return our loss and its gradients for the image features, the text features, theta and any bias."""
    image, text = (x.float() for x in pairs(ROWS, DIM))
    found, seen = with_scalar_gradients(method, batch(image, text), step())
    return [found.loss, found.image, found.text, *seen.values()]


def compare(found: list[Tensor], single: list[Tensor], double: list[Tensor]) -> None:
    for value, near, exact in zip(found, single, double, strict=True):
        theirs_off = relative_error(near.double(), exact)
        assert relative_error(value.double(), exact) < max(1e-6, 2 * theirs_off)
        assert relative_error(value, near) < max(1e-6, 3 * theirs_off)


@pytest.mark.parametrize("tau", [0.1, 0.07, 0.03, 0.01])
@pytest.mark.parametrize(("name", "peers", "bias"), [("openclip", "ClipLoss", []), ("siglip", "SigLipLoss", [-10.0])])
def test_losses(name: str, peers: str, bias: list[float], tau: float) -> None:
    method = objective(name, Communicator(), DIM, torch.float32, temperature={"initial": tau})
    single, double = (
        theirs(getattr(peer, peers)(), dtype, [1 / tau, *bias]) for dtype in (torch.float32, torch.float64)
    )
    found = ours(method)
    found[3] = found[3] * tau  # open_clip's gradient is for exp(theta)
    compare(found, single, double)
