"""The closed-form gradients equal float64 autograd of the losses as the papers write them."""

import math
from typing import Any

import oracle
import pytest
import torch
from build import (
    NO_MOMENTUM,
    SAMPLES,
    Result,
    build_loss,
    call,
    pairs,
    position,
    relative_error,
    replicated_state,
    scalar_gradients,
    table_rows,
)
from torch import Tensor

from neuclip_ds.losses import global_contrastive
from neuclip_ds.losses.pairs import CACHED_BYTES

SIZES = [(2, 3), (7, 5), (33, 17), (64, 8)]
TAUS = [0.01, 0.07, 1.0]
EXACT = 1e-10


def leaves(size: int, dim: int, seed: int = 0, likeness: float = 1.0) -> tuple[Tensor, Tensor]:
    image, text = pairs(size, dim, seed, likeness)
    return image.requires_grad_(), text.requires_grad_()


def log_inverse(tau: float) -> Tensor:
    """Return theta = log(1/tau) as a leaf tensor."""
    return torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)


def gradient(loss: Tensor, leaf: Tensor) -> float:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0].item()


def assert_gradients(result: Result, loss: Tensor, image: Tensor, text: Tensor) -> None:
    image_gradient, text_gradient = torch.autograd.grad(loss, (image, text), retain_graph=True)
    assert relative_error(result.image, image_gradient) < EXACT
    assert relative_error(result.text, text_gradient) < EXACT


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("size", "dim"), SIZES)
def test_openclip(size: int, dim: int, tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the size of blocks, nor on whether similarities are cached."""
    theta = log_inverse(tau)
    for chunk, cached_bytes in ((1024, CACHED_BYTES), (3, CACHED_BYTES), (5, 0)):
        monkeypatch.setattr(global_contrastive, "CACHED_BYTES", cached_bytes)
        image, text = leaves(size, dim)
        loss_fn = build_loss(
            "openclip", dim=dim, betas=NO_MOMENTUM, temperature={"initial": tau, "lr": 0.0}, chunk_size=chunk
        )
        result = call(loss_fn, image, text)
        loss = oracle.openclip(image, text, (-theta).exp())
        assert_gradients(result, loss, image, text)
        theta_gradient = scalar_gradients(loss_fn)["theta"].item()
        assert theta_gradient == pytest.approx(gradient(loss, theta), rel=1e-9, abs=1e-12)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert result.metrics["batch_loss"].item() == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("size", "dim"), SIZES)
def test_fastclip_v3_in_the_first_and_in_later_visits(size: int, dim: int, tau: float) -> None:
    eps = 1e-6
    gamma_min = 0.3
    loss_fn = build_loss(
        "fastclip_v3",
        dim=dim,
        eps=eps,
        chunk_size=4,
        temperature={"initial": tau, "lr": 0.0},
        moving_average={"gamma_min": gamma_min, "gamma_epochs": 2},
    )
    constant_tau = torch.tensor(tau, dtype=torch.float64)
    u = None
    for visit, gamma in enumerate([1.0, 0.5 * (1 - gamma_min) + gamma_min, gamma_min]):
        image, text = leaves(size, dim, seed=visit)
        result = call(loss_fn, image, text, at=position(visit, epoch=visit))
        g = oracle.mean_exponentials(image, text, constant_tau).detach()
        u = g if u is None else (1 - gamma) * u + gamma * g
        assert_gradients(result, oracle.global_contrastive(image, text, constant_tau, u, eps), image, text)
        assert float(result.loss) == pytest.approx(float(tau * torch.log(eps + u).mean(1).sum()), rel=1e-9)


def test_fastclip_v0_follows_the_paper_or_the_released_code() -> None:
    """Relative to the features' gradient, the released code's gradient for theta is twice the paper's."""
    eps = 1e-6
    tau = 0.05
    for reference in ("paper", "released_code"):
        loss_fn = build_loss(
            "fastclip_v0",
            betas=NO_MOMENTUM,
            eps=eps,
            reference=reference,
            temperature={"initial": tau, "lr": 0.0},
            moving_average={"gamma": "constant", "gamma_min": 0.4},
        )
        u = None
        for visit in range(2):
            image, text = leaves(17, 6, seed=visit)
            result = call(loss_fn, image, text, at=position(visit, epoch=visit))
            theta = log_inverse(tau)
            g = oracle.mean_exponentials(image, text, (-theta).exp())
            u = g.detach() if u is None else 0.6 * u + 0.4 * g.detach()
            assert float(result.loss) == pytest.approx(float(torch.log(eps + u).mean(1).sum()), rel=1e-10)
            if reference == "paper":
                loss = (g / (eps + u)).mean(1).sum()
            else:  # the features' gradient is half of the paper's, which Adam does not notice
                loss = 2 * oracle.fastclip_v0_released_code(image, text, (-theta).exp(), u, eps)
            assert_gradients(result, loss, image, text)
            theta_gradient = scalar_gradients(loss_fn)["theta"].item()
            assert theta_gradient == pytest.approx(gradient(loss, theta), rel=1e-10)


@pytest.mark.parametrize(
    "npn",
    [{"alpha_grad": "stop"}, {"alpha_grad": "full"}, {"alpha_grad": "positive"}, {"kappa": 0.25}, {"kappa": 4.0}],
)
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("size", "dim", "prototypes"), [(7, 5, 6), (33, 17, 40), (24, 8, 16)])
def test_neuclip(size: int, dim: int, prototypes: int, tau: float, npn: dict[str, Any]) -> None:
    eps = 1e-14
    rho = 2.0
    loss_fn = build_loss(
        "neuclip",
        dim=dim,
        betas=NO_MOMENTUM,
        eps=eps,
        chunk_size=5,
        temperature={"initial": tau, "lr": 0.0, "rho": rho},
        npn={"prototypes": prototypes, "inner_steps": 2, "lr": 0.05, **npn},
    )
    number = 0
    while number * size < prototypes:  # fill the queue; until it is full, the batch gives the normalizer
        call(loss_fn, *pairs(size, dim, seed=100 + number), at=position(number))
        number += 1
    image, text = leaves(size, dim)
    result = call(loss_fn, image, text, at=position(number))
    prototype_rows = table_rows(loss_fn, "npn")
    theta = log_inverse(tau)
    arguments = (image, text, (-theta).exp(), prototype_rows["w1"], prototype_rows["w2"], eps, rho)
    if "kappa" in npn:
        loss = oracle.pooled_neuclip(*arguments, npn["kappa"])
    else:
        loss = oracle.neuclip(*arguments, npn["alpha_grad"])
    assert_gradients(result, loss, image, text)
    assert scalar_gradients(loss_fn)["theta"].item() == pytest.approx(gradient(loss, theta), rel=1e-9)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("bias", [-10.0, 0.0, 3.0])
def test_siglip(tau: float, bias: float) -> None:
    for size, chunk in ((2, None), (33, 5), (33, None)):
        image, text = leaves(size, 5)
        theta = log_inverse(tau)
        offset = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
        loss = oracle.siglip(image, text, (-theta).exp(), offset)
        image_gradient, text_gradient, theta_gradient, bias_gradient = torch.autograd.grad(
            loss, (image, text, theta, offset)
        )
        loss_fn = build_loss(
            "siglip",
            dim=5,
            betas=NO_MOMENTUM,
            siglip={"bias": bias},
            chunk_size=chunk,
            temperature={"initial": tau, "lr": 0.0},
        )
        result = call(loss_fn, image, text)
        scalars = scalar_gradients(loss_fn)
        assert relative_error(result.image, image_gradient) < EXACT
        assert relative_error(result.text, text_gradient) < EXACT
        assert relative_error(scalars["theta"], theta_gradient) < EXACT
        assert relative_error(scalars["bias"], bias_gradient) < EXACT
        assert float(result.loss) == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("tau", TAUS)
def test_no_rho_is_openclip_over_the_data_set(tau: float) -> None:
    """With the whole dataset as the batch and no prototypes yet, the gradients equal OpenCLIP's."""
    temperature = {"initial": tau, "rule": "learned", "lr": 1e-3}
    samples = SAMPLES // 10
    image, text = pairs(samples, 8)
    results: dict[str, list[Tensor]] = {}
    for name, options in {
        "neuclip": {"npn": {"prototypes": 4096}, "temperature": temperature},
        "neuclip_queue": {"temperature": temperature},
        "openclip": {"temperature": {"initial": tau, "lr": 1e-3}},
    }.items():
        loss_fn = build_loss(name, dim=8, samples=samples, **options)
        result = call(loss_fn, image, text)
        moment = replicated_state(loss_fn)["temperature.adam.theta.exp_avg"]
        results[name] = [result.image, result.text, moment, result.loss]
    for name in ("neuclip", "neuclip_queue"):
        for value, expected in zip(results[name], results["openclip"], strict=True):
            assert relative_error(value, expected) < EXACT, name
