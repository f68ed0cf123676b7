"""Check AmorLIP's stage II against autograd of its loss, and check its evaluation, rho and float32 results."""

import math

import oracle
import pytest
import torch
from amortization import DIM, EXACT, TAU, amorlip, log_partition, net_of, predict
from build import batch, objective, pairs, relative_error, step, with_scalar_gradients

from neuclip_ds.distributed.communicator import Communicator


@pytest.mark.parametrize("c", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
@pytest.mark.parametrize("amortizes", ["partition", "negatives"])
@pytest.mark.parametrize(("tau", "chunk"), [(0.02, None), (0.2, 5)])
def test_stage_two(c: float, encoder_normalizer: str, amortizes: str, tau: float, chunk: int | None) -> None:
    """The loss and its gradients for the features and for theta = log(1/tau) match autograd, with rho included.

    If the net predicts the sum over negatives only, the batch's positives are added to its prediction.
    """
    image, text = (x.requires_grad_() for x in pairs(17, DIM))
    options = {"encoder_normalizer": encoder_normalizer, "amortizes": amortizes, "ema": 0.5, "target_every": 1}
    options |= {"lr": 0.05}
    method = amorlip(tau, rho=3.0, common={"chunk_size": chunk}, positive_weight=c, **options)
    found, seen = with_scalar_gradients(method, batch(image.detach(), text.detach()), step())
    target = predict(net_of(method, "target"), image, text)
    log_lambda = target if encoder_normalizer == "ema" else log_partition(image, text, tau, c)
    if amortizes == "negatives" and encoder_normalizer == "ema":
        log_lambda = (target.exp() + c / 16 * ((image * text).sum(1).detach() / tau).exp()).log()
    theta = torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)
    loss = oracle.amorlip(image, text, (-theta).exp(), log_lambda, c, rho=3.0)
    wanted = torch.autograd.grad(loss, (image, text, theta))
    for value, exact in zip((found.image, found.text, seen["theta"]), wanted, strict=True):
        assert relative_error(value, exact) < EXACT
    assert float(found.loss) == pytest.approx(float(loss.detach()), rel=1e-10)


@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
def test_stage_two_in_float32_at_the_coldest_temperature(encoder_normalizer: str) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        method = amorlip(0.01, encoder_normalizer=encoder_normalizer, dtype=dtype)
        for number in range(3):
            image, text = pairs(32, DIM, seed=number)
            found = method(batch(image.to(dtype), text.to(dtype)), step(number, epoch=number))
        results.append(found)
    assert relative_error(results[0].image.double(), results[1].image) < 1e-3
    assert relative_error(results[0].text.double(), results[1].text) < 1e-3


@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
def test_the_estimate_that_is_evaluated_is_the_one_in_use(encoder_normalizer: str) -> None:
    method = amorlip(encoder_normalizer=encoder_normalizer, positive_weight=0.3)
    image, text = pairs(9, DIM)
    features = batch(image, text)
    assert torch.isneginf(method.log_normalizers(features)[0]).all(), "no net yet"
    method(features, step(0))
    log_estimate, _ = method.log_normalizers(features)
    log_lambda = log_partition(image, text, TAU, 0.3)
    if encoder_normalizer == "ema":
        log_lambda = predict(net_of(method, "target"), image, text)
    negatives = (log_lambda - (image * text).sum(1) / TAU).exp() - 0.3 / 8  # without the positive's term
    torch.testing.assert_close(log_estimate, negatives.clamp(min=0).log(), rtol=EXACT, atol=EXACT)
    assert torch.isfinite(log_estimate).any()


def test_rho_counts_once_and_is_annealed() -> None:
    rule = amorlip(rho=[8.0, -8.0])._temperature
    assert [2 * rule.rho(step()._replace(progress=share)) for share in (0.0, 0.49, 0.5, 0.99)] == [8, 8, -8, -8]


@pytest.mark.parametrize("tau", [0.003, 0.01])
@pytest.mark.parametrize("reference", ["paper", "released_code"])
@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
@pytest.mark.parametrize("loss", ["l2_log", "kl", "js"])
def test_float32_at_low_temperatures(tau: float, reference: str, encoder_normalizer: str, loss: str) -> None:
    """All values stay finite although new nets miss log C by up to 300, so that C/lambda overflows float32."""
    method = objective(
        "amorlip", Communicator(), DIM, torch.float32,
        temperature={"initial": tau, "minimum": 0.003, "rho": 2.0},
        reference=reference,
        amortized={"encoder_normalizer": encoder_normalizer, "loss": loss},
    )  # fmt: skip
    for number in range(5):
        image, text = (x.float() for x in pairs(32, DIM, seed=number, likeness=(-1) ** number))
        found = method(batch(image, text), step(number, epoch=number // 3))
        assert all(torch.isfinite(x).all() for x in (found.image, found.text, found.loss, *found.metrics.values()))
    assert all(torch.isfinite(value).all() for value in method.replicated_state().values())
