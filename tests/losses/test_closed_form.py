"""The closed-form gradients equal float64 autograd of the losses as the papers write them."""

import math

import oracle
import pytest
import torch
from build import SAMPLES, batch, objective, pairs, relative_error, step, with_scalar_gradients
from neuclip_ds.objectives import build_objective, contrastive
from neuclip_ds.objectives.general_pairs import GeneralSimilarities
from neuclip_ds.objectives.pair_gradient import pair_similarities
from neuclip_ds.objectives.pair_grid import PairGrid
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Context
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.pairs import PairLoss

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


def compare(found, loss: Tensor, image: Tensor, text: Tensor, limit: float = EXACT) -> None:
    by_image, by_text = torch.autograd.grad(loss, (image, text), retain_graph=True)
    assert relative_error(found.image, by_image) < limit
    assert relative_error(found.text, by_text) < limit


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("size", "dim"), SIZES)
@pytest.mark.parametrize(("chunk", "kept"), [(1024, 1e8), (3, 1e8), (5, 0)])
def test_openclip(size: int, dim: int, tau: float, chunk: int, kept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive, "KEPT_BYTES", kept)
    image, text = leaves(size, dim)
    method = objective("openclip", Communicator(), dim, temperature={"initial": tau}, chunk_size=chunk)
    found, scalars = with_scalar_gradients(method, batch(image.detach(), text.detach()), step())
    theta = log_inverse(tau)
    loss = oracle.openclip(image, text, (-theta).exp())
    compare(found, loss, image, text)
    assert scalars["theta"].item() == pytest.approx(gradient(loss, theta), rel=1e-9, abs=1e-12)
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert found.metrics["batch_loss"].item() == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("size", "dim"), SIZES)
def test_fastclip_first_and_later_visit(size: int, dim: int, tau: float) -> None:
    eps, gamma_min = 1e-6, 0.3
    method = objective(
        "fastclip_v3",
        Communicator(),
        dim,
        eps=eps,
        chunk_size=4,
        temperature={"initial": tau, "lr": 0.0},
        moving_average={"gamma_min": gamma_min, "gamma_epochs": 2},
    )
    fixed = torch.tensor(tau, dtype=torch.float64)
    u = None
    for visit, gamma in enumerate([1.0, 0.5 * (1 - gamma_min) + gamma_min, gamma_min]):
        image, text = leaves(size, dim, seed=visit)
        found = method(batch(image.detach(), text.detach()), step(visit, epoch=visit))
        g = torch.stack([oracle.log_mean_exp(x).exp() for x in oracle.logits(image, text, fixed)]).detach()
        u = g if u is None else (1 - gamma) * u + gamma * g
        compare(found, oracle.global_contrastive(image, text, fixed, u, eps), image, text)
        assert float(found.loss) == pytest.approx(float(tau * torch.log(eps + u).mean(1).sum()), rel=1e-9)


@pytest.mark.parametrize("reading", ["stop", "full", "positive"])
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("size", "dim", "prototypes"), [(7, 5, 6), (33, 17, 40), (24, 8, 16)])
def test_neuclip(size: int, dim: int, prototypes: int, tau: float, reading: str) -> None:
    eps, rho = 1e-14, 2.0
    method = objective(
        "neuclip",
        Communicator(),
        dim,
        eps=eps,
        chunk_size=5,
        temperature={"initial": tau, "lr": 0.0, "rho": rho},
        npn={"prototypes": prototypes, "inner_steps": 2, "lr": 0.05, "alpha_grad": reading},
    )
    number = 0
    while number * size < prototypes:  # fill the queue; until it is full, the batch gives the normalizer
        image, text = leaves(size, dim, seed=100 + number)
        method(batch(image.detach(), text.detach()), step(number))
        number += 1
    image, text = leaves(size, dim)
    found, scalars = with_scalar_gradients(method, batch(image.detach(), text.detach()), step(number))
    w1, w2 = (method.row_tables()["npn"].tensors[name] for name in ("w1", "w2"))
    theta = log_inverse(tau)
    loss = oracle.neuclip(image, text, (-theta).exp(), w1, w2, eps, rho, reading)
    compare(found, loss, image, text)
    assert scalars["theta"].item() == pytest.approx(gradient(loss, theta), rel=1e-9)
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("bias", [-10.0, 0.0, 3.0])
@pytest.mark.parametrize(("size", "chunk"), [(2, None), (33, 5), (33, None)])
def test_siglip(tau: float, bias: float, size: int, chunk: int | None) -> None:
    image, text = leaves(size, 5)
    theta, offset = log_inverse(tau), torch.tensor(bias, dtype=torch.float64, requires_grad=True)
    loss = oracle.siglip(image, text, (-theta).exp(), offset)
    wanted = torch.autograd.grad(loss, (image, text, theta, offset))
    options = {"siglip": {"bias": bias}, "chunk_size": chunk, "temperature": {"initial": tau}}
    method = objective("siglip", Communicator(), 5, **options)
    found, seen = with_scalar_gradients(method, batch(image.detach(), text.detach()), step())
    for value, target in zip((found.image, found.text, seen["theta"], seen["bias"]), wanted, strict=True):
        assert relative_error(value, target) < 1e-10
    assert float(found.loss) == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize("tau", TAUS)
def test_no_rho_is_openclip_over_the_data_set(tau: float) -> None:
    """With the whole dataset as the batch and no prototypes yet, the gradients equal OpenCLIP's."""
    temperature = {"initial": tau, "rule": "learned", "lr": 1e-3}
    image, text = pairs(SAMPLES // 10, 8)
    found = {}
    for name, options in {
        "neuclip": {"npn": {"prototypes": 4096}, "temperature": temperature},
        "neuclip_queue": {"temperature": temperature},
        "openclip": {"temperature": {"initial": tau, "lr": 1e-3}},
    }.items():
        context = Context(8, SAMPLES // 10, Communicator(), torch.float64)
        config = Config.model_validate({"objective": {"method": name, **options}})
        built = build_objective(config, context, torch.float64)
        result = built(batch(image, text), step())
        moment = built.replicated_state()["temperature.adam.theta.exp_avg"]
        found[name] = (result.image, result.text, moment, result.loss)
    for name in ("neuclip", "neuclip_queue"):
        for ours, theirs in zip(found[name], found["openclip"], strict=True):
            assert relative_error(ours, theirs) < EXACT, name


@pytest.mark.parametrize(("negative", "excess"), [(0.1, 0.0), (-0.97, 0.0), (-0.3, 60.0)])
def test_float32_where_one_exponential_a_pair_would_not_fit(negative: float, excess: float) -> None:
    """At tau = 0.01, float32 is accurate even if exp(s/tau) vanishes for all negatives or if weights far exceed 1/g."""
    image = torch.eye(2, 8, dtype=torch.float64)
    text = negative * image.flip(0) + (1 - negative**2) ** 0.5 * image
    results = []
    for dtype in (torch.float32, torch.float64):
        gathered = GatheredFeatures(batch(image.to(dtype), text.to(dtype)), Communicator(), dtype)
        tau = torch.tensor(0.01, dtype=dtype)
        similarities = pair_similarities(PairGrid(gathered, None, 1e9), PairLoss(), tau)
        log_g = similarities.log_mean_exp()
        results.append((log_g, *similarities.gradient(excess - log_g)))
    for single, double in zip(*results, strict=True):
        assert relative_error(single.double(), double) < 1e-4


def placed(kind: str) -> tuple[Tensor, Tensor]:
    """Return (24, 6) images and texts: matching pairs, or features near one point or near two opposite points."""
    image, text = pairs(24, 6)
    place = torch.ones(24, 1, dtype=torch.float64)
    if kind == "opposed":
        place[::2] = -1
    shift = 0 if kind == "matched" else 3 * place
    return normalize(image + shift, dim=1), normalize(text + shift, dim=1)


@pytest.mark.parametrize("general", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("tau", [0.003, 0.01, 0.07])
@pytest.mark.parametrize("kind", ["matched", "collapsed", "opposed"])
def test_one_temperature_in_both_precisions(kind: str, tau: float, general: bool) -> None:
    image, text = (x.requires_grad_() for x in placed(kind))
    leaf = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    wanted = torch.stack([oracle.log_mean_exp(x) for x in oracle.logits(image, text, leaf)])
    double = leaf.detach()
    generator = torch.Generator().manual_seed(3)
    log_weight = torch.randn(2, 24, generator=generator, dtype=torch.float64) - wanted.detach()
    loss = (log_weight + wanted).exp().mean(1).sum()
    *by_features, by_tau = torch.autograd.grad(loss, (image, text, leaf))
    for dtype, limit in ((torch.float64, EXACT), (torch.float32, 1e-6 / tau)):
        gathered = GatheredFeatures(batch(image.detach().to(dtype), text.detach().to(dtype)), Communicator(), dtype)
        form = GeneralSimilarities if general else pair_similarities
        similarities = form(PairGrid(gathered, 7, 1e9), PairLoss(), double.to(dtype))
        assert relative_error(similarities.log_mean_exp().double(), wanted.detach()) < limit
        found = similarities.gradient(log_weight.to(dtype))
        for value, exact in zip((found.image, found.text), by_features, strict=True):
            assert relative_error(value.double(), exact) < limit
        assert float(found.mean_logit) / 24 == pytest.approx(float(-double * by_tau), rel=limit)
