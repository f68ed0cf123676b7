"""Check individual temperatures by hand: FastCLIP eq. 9 with a per-sample Adam, and the released code's variant."""

import math
from typing import Any

import oracle
import pytest
import torch
from build import batch, columns, objective, pairs, step
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError

BETA1, BETA2, EPS, LR, RHO, FLOOR = 0.9, 0.98, 1e-8, 1e-2, 1.5, 1e-6


def build(reference: str, **temperature: Any) -> Any:
    options = {"initial": 0.05, "lr": LR, "schedule": "constant", "rho": RHO, **temperature}
    average = {"gamma": "constant", "gamma_min": 0.4}
    return objective(
        "isogclr", Communicator(), 5, eps=FLOOR, temperature=options, moving_average=average, reference=reference
    )


def gradient(image: Tensor, text: Tensor, tau: Tensor, u: Tensor) -> Tensor:
    """Return log(eps + u) + rho + tau/(eps + u) dg/dtau, of shape (2, B), with dg/dtau from autograd."""
    leaf = tau.clone().requires_grad_()
    g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, leaf)])
    (grad_tau,) = torch.autograd.grad(g.sum(), leaf)
    return torch.log(FLOOR + u) + RHO + tau / (FLOOR + u) * grad_tau


@pytest.mark.parametrize("reference", ["paper", "released_code"])
def test_three_visits_by_hand(reference: str) -> None:
    method = build(reference)
    tau = torch.full((2, 8), 0.05, dtype=torch.float64)
    m, v, u = torch.zeros_like(tau), torch.zeros_like(tau), None
    for visit in range(3):
        image, text = pairs(8, 5, seed=visit)
        found = method(batch(image, text), step(visit, epoch=visit))
        g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
        u = g if u is None else 0.6 * u + 0.4 * g
        scale = tau if reference == "paper" else 1.0  # the released code has no leading tau_i
        loss = (scale * torch.log(FLOOR + u) + tau * RHO).mean(1).sum()
        assert float(found.loss) == pytest.approx(float(loss), rel=1e-10)
        G = gradient(image, text, tau, u)
        beta1, beta2, corrections = BETA1, BETA2, (1 - BETA1 ** (visit + 1), 1 - BETA2 ** (visit + 1))
        if reference == "released_code":
            G = G.clamp(-5, 5)
            if visit == 0:  # in the released code's epoch 0, Adam has no memory and steps by the sign
                beta1, beta2, corrections = 0.0, 0.0, (1.0, 1.0)
        m, v = beta1 * m + (1 - beta1) * G, beta2 * v + (1 - beta2) * G**2
        change = (m / corrections[0]) / ((v / corrections[1]).sqrt() + EPS)
        tau = (tau - LR * change).clamp(0.01, 1.0)
        rows = columns(method.row_tables()["temperatures"])
        torch.testing.assert_close(rows["tau_image"][:8], tau[0], rtol=1e-9, atol=0)
        torch.testing.assert_close(rows["tau_text"][:8], tau[1], rtol=1e-9, atol=0)
    assert float(rows["visits"][:8].unique()) == 3
    assert not rows["visits"][8:].any(), "samples that were not seen stay as they were"
    assert (rows["tau_image"][8:] == 0.05).all()


def test_temperatures_stay_within_their_bounds() -> None:
    method = build("paper", lr=10.0, minimum=0.04, maximum=0.06)
    for number in range(2):
        method(batch(*pairs(8, 5, seed=number)), step(number))
    rows = columns(method.row_tables()["temperatures"])
    assert (rows["tau_image"] >= 0.04).all()
    assert (rows["tau_image"] <= 0.06).all()
    assert math.isclose(float(rows["tau_image"][:8].max()), 0.06) or math.isclose(float(rows["tau_image"].min()), 0.04)


@pytest.mark.parametrize("option", [{"schedule": "third_below_0.03"}, {"optimizer": "lion"}])
def test_options_of_one_temperature_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(UserError, match="individual ones take"):
        build("paper", **option)
