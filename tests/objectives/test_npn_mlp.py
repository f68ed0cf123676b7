"""The MLP form of NeuCLIP's network."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from build import batch, objective, pairs, relative_error, step, with_scalar_gradients

from neuclip_ds.distributed.communicator import Communicator

DIM, EPS = 6, 1e-6


def build(**npn: Any) -> Any:
    return objective("neuclip", Communicator(), DIM, eps=EPS, npn={"network": "mlp", **npn}, temperature={"lr": 0.0})


@pytest.mark.parametrize("goal", ["unified", "separate"])
def test_updates_follow_adam_on_the_objective(goal: str) -> None:
    method = build(inner_steps=3, objective=goal, mlp_lr=0.01)
    normalizer = method._normalizer
    image, text = pairs(15, DIM)
    tau = torch.tensor(0.07, dtype=torch.float64)
    start = normalizer._weights.detach().clone()
    g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    features, positive = torch.stack([image, text]), (image * text).sum(1) / tau
    with torch.no_grad():
        level = (torch.log(EPS + g) + positive - normalizer._mlp(start, features)).mean(1)
        normalizer._mlp.weights(start).out_bias.add_(level.view(2, 1, 1))
    weights = torch.nn.Parameter(start)
    adam = torch.optim.Adam([weights], lr=0.01)
    for _ in range(3):
        adam.zero_grad()
        alpha = torch.log(EPS + (normalizer._mlp(weights, features) - positive).exp())
        unified = tau * ((-alpha).exp() * (EPS + g) + alpha)
        (unified if goal == "unified" else (alpha - torch.log(EPS + g)).square()).mean(1).sum().backward()
        adam.step()
    found = method(batch(image, text), step())
    assert relative_error(normalizer._weights.detach(), weights.detach()) < 1e-9
    with torch.no_grad():
        alpha = torch.log(EPS + (normalizer._mlp(weights, features) - positive).exp())
    assert float(found.metrics["alpha"]) == pytest.approx(float(alpha.mean()), rel=1e-8)


@pytest.mark.parametrize("reading", ["full", "positive", "stop"])
@pytest.mark.parametrize("max_ratio", [None, 0.8])
def test_gradients_are_autograds(reading: str, max_ratio: float | None) -> None:
    """Of the features, and of theta = log(1/tau), through f where alpha_grad=full."""
    method = build(inner_steps=2, mlp_lr=0.1, alpha_grad=reading, max_ratio=max_ratio)
    method(batch(*pairs(15, DIM, seed=1)), step())
    image, text = (x.requires_grad_() for x in pairs(15, DIM))
    found, scalars = with_scalar_gradients(method, batch(image.detach(), text.detach()), step(1))
    normalizer = method._normalizer
    theta = torch.tensor(method.replicated_state()["temperature.theta"].item(), dtype=torch.float64, requires_grad=True)
    tau, positive = (-theta).exp(), (image * text).sum(1)
    log_normalizer = normalizer._mlp(normalizer._weights.detach(), torch.stack([image, text]))
    alpha = torch.log(EPS + (log_normalizer - positive / tau).exp())
    loss = tau * oracle.conjugate(image, text, tau, alpha, EPS, reading, max_ratio)
    by_image, by_text, by_theta = torch.autograd.grad(loss, (image, text, theta))
    assert relative_error(found.image, by_image) < 1e-10
    assert relative_error(found.text, by_text) < 1e-10
    assert float(scalars["theta"]) == pytest.approx(float(by_theta), rel=1e-10)
