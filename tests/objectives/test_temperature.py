"""The temperature's gradients against autograd, its schedule and its clamp."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from build import batch, objective, pairs, step

from neuclip_ds.distributed.communicator import Communicator


def tau_of(method) -> float:
    return math.exp(-float(method.replicated_state()["temperature.theta"]))


def descent(method, monkeypatch: pytest.MonkeyPatch, features, at) -> float:
    """d loss / d theta that the rule hands to Adam."""
    seen = []
    rule = method._temperature
    monkeypatch.setattr(rule, "descend", lambda _, theta: seen.append(float(theta)))
    method(features, at)
    return seen[-1]


def test_openclip_gradient_through_the_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    image, text = pairs(17, 6)
    theta = torch.tensor(-math.log(0.07), dtype=torch.float64, requires_grad=True)
    oracle.openclip(image, text, (-theta).exp()).backward()
    method = objective("openclip", Communicator(), 6)
    assert descent(method, monkeypatch, batch(image, text), step()) == pytest.approx(float(theta.grad), rel=1e-10)


@pytest.mark.parametrize(("data_term", "coefficient"), [("paper", 1), ("released_code", 2)])
def test_rgcl_g_gradient(data_term: str, coefficient: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image, text = pairs(17, 6)
    tau, rho, eps = torch.tensor(0.05, dtype=torch.float64), 6.5, 1e-6
    u = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, tau)])
    level = float(torch.log(eps + u).mean(1).sum() + 2 * rho)
    data = float(oracle.robust_tau_gradient(image, text, tau, u, eps, rho)) - level
    options = {"initial": 0.05, "rho": rho, "data_term": data_term}
    method = objective("fastclip_v3", Communicator(), 6, eps=eps, temperature=options)
    found = descent(method, monkeypatch, batch(image, text), step())
    assert found == pytest.approx(-0.05 * (level + coefficient * data), rel=1e-10)


@pytest.mark.parametrize("reading", ["stop", "full"])
def test_neuclip_gradient(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image, text = pairs(17, 6)
    rho, eps = 3.0, 1e-14
    npn = {"prototypes": 17, "updates": 3, "lr": 0.05, "alpha_grad": reading}
    method = objective("neuclip", Communicator(), 6, eps=eps, temperature={"rho": rho, "lr": 0.0}, npn=npn)
    method(batch(*pairs(17, 6, seed=5)), step(0))
    found = descent(method, monkeypatch, batch(image, text), step(1))
    table = method.row_tables()["npn"].tensors
    theta = torch.tensor(-math.log(0.07), dtype=torch.float64, requires_grad=True)
    oracle.neuclip(image, text, (-theta).exp(), table["w1"], table["w2"], eps, rho, reading == "stop").backward()
    assert found == pytest.approx(float(theta.grad), rel=1e-10)


def test_clamp_holds_openclip_at_one_hundred() -> None:
    method = objective("openclip", Communicator(), 6, temperature={"initial": 0.0101, "lr": 1.0})
    image, text = pairs(8, 6, likeness=100.0)  # all solved: the loss wants tau smaller
    for number in range(3):
        method(batch(image, text), step(number))
    assert tau_of(method) == pytest.approx(0.01)


@pytest.mark.parametrize(("initial", "share"), [(0.05, 1.0), (0.02, 1 / 3)])
def test_learning_rate_falls_to_a_third_below_threshold(initial: float, share: float) -> None:
    options = {"initial": initial, "lr": 1e-3, "schedule": "third_below_0.03", "rho": 100.0}
    method = objective("fastclip_v3", Communicator(), 6, temperature=options)
    method(batch(*pairs(8, 6)), step(0))
    # Adam's first step is the learning rate itself; a large rho wants tau smaller, theta larger
    assert math.log(initial / tau_of(method)) == pytest.approx(1e-3 * share, rel=1e-4)


def test_encoder_schedule_scales_the_rate() -> None:
    options = {"lr": 1e-2, "rho": 100.0}
    method = objective("fastclip_v3", Communicator(), 6, temperature=options)
    method(batch(*pairs(8, 6)), step(0, lr=2.5e-4))  # a quarter of the peak
    assert math.log(0.07 / tau_of(method)) == pytest.approx(2.5e-3, rel=1e-4)
