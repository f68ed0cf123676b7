"""Check individual temperatures by hand: FastCLIP eq. 9 with a per-sample Adam, and the released code's variant."""

import math
from typing import Any

import oracle
import pytest
import torch
from build import build_loss, call, columns, pairs, position
from torch import Tensor

from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss

BETA1 = 0.9
BETA2 = 0.98
ADAM_EPS = 1e-8
LR = 1e-2
RHO = 1.5
EPS = 1e-6


def isogclr(reference: str, **temperature: Any) -> ContrastiveLoss:
    return build_loss(
        "isogclr",
        dim=5,
        betas=(BETA1, BETA2),
        eps=EPS,
        temperature={"initial": 0.05, "lr": LR, "schedule": "constant", "rho": RHO, **temperature},
        moving_average={"gamma": "constant", "gamma_min": 0.4},
        reference=reference,
    )


def temperatures(loss_fn: ContrastiveLoss) -> dict[str, Tensor]:
    return columns(loss_fn.function.row_tables()["temperatures"])


def tau_gradient(image: Tensor, text: Tensor, tau: Tensor, u: Tensor) -> Tensor:
    """Return log(eps + u) + rho + tau/(eps + u) dg/dtau, of shape (2, B), with dg/dtau from autograd."""
    leaf = tau.clone().requires_grad_()
    g = oracle.mean_exponentials(image, text, leaf)
    (g_gradient,) = torch.autograd.grad(g.sum(), leaf)
    return torch.log(EPS + u) + RHO + tau / (EPS + u) * g_gradient


@pytest.mark.parametrize("reference", ["paper", "released_code"])
def test_three_visits_are_adam_steps_of_each_samples_temperatures(reference: str) -> None:
    loss_fn = isogclr(reference)
    is_released = reference == "released_code"
    tau = torch.full((2, 8), 0.05, dtype=torch.float64)
    moment = torch.zeros_like(tau)
    square = torch.zeros_like(tau)
    u = None
    for visit in range(3):
        image, text = pairs(8, 5, seed=visit)
        result = call(loss_fn, image, text, at=position(visit, epoch=visit))
        g = oracle.mean_exponentials(image, text, tau)
        u = g if u is None else 0.6 * u + 0.4 * g
        scale = 1.0 if is_released else tau  # the released code has no leading tau_i
        loss = (scale * torch.log(EPS + u) + tau * RHO).mean(1).sum()
        assert float(result.loss) == pytest.approx(float(loss), rel=1e-10)

        gradient = tau_gradient(image, text, tau, u)
        beta1 = BETA1
        beta2 = BETA2
        correction1 = 1 - BETA1 ** (visit + 1)
        correction2 = 1 - BETA2 ** (visit + 1)
        if is_released:
            gradient = gradient.clamp(-5, 5)
            if visit == 0:  # in the released code's epoch 0, Adam has no memory and steps by the sign
                beta1 = beta2 = 0.0
                correction1 = correction2 = 1.0
        moment = beta1 * moment + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        change = (moment / correction1) / ((square / correction2).sqrt() + ADAM_EPS)
        tau = (tau - LR * change).clamp(0.01, 1.0)
        stored = temperatures(loss_fn)
        torch.testing.assert_close(stored["tau_image"][:8], tau[0], rtol=1e-9, atol=0)
        torch.testing.assert_close(stored["tau_text"][:8], tau[1], rtol=1e-9, atol=0)
    assert float(stored["visits"][:8].unique()) == 3
    assert not stored["visits"][8:].any(), "samples that were not seen stay as they were"
    assert (stored["tau_image"][8:] == 0.05).all()


def test_temperatures_stay_within_their_bounds() -> None:
    loss_fn = isogclr("paper", lr=10.0, minimum=0.04, maximum=0.06)
    for number in range(2):
        call(loss_fn, *pairs(8, 5, seed=number), at=position(number))
    tau = temperatures(loss_fn)["tau_image"]
    assert (tau >= 0.04).all()
    assert (tau <= 0.06).all()
    assert math.isclose(float(tau[:8].max()), 0.06) or math.isclose(float(tau.min()), 0.04)


@pytest.mark.parametrize("option", [{"schedule": "third_below_0.03"}, {"optimizer": "lion"}])
def test_options_of_one_temperature_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(UserError, match="for individual temperatures, set this option to"):
        isogclr("paper", **option)
