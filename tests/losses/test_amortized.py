"""Check AmorLIP's stage II against autograd of its loss, and check its evaluation, rho and float32 results."""

import math
from dataclasses import replace

import oracle
import pytest
import torch
from amortization import DIM, EXACT, TAU, amorlip, log_partition, net_of, predict
from build import build_loss, call, pairs, position, relative_error, replicated_state, scalar_gradients


@pytest.mark.parametrize("c", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
@pytest.mark.parametrize("amortizes", ["partition", "negatives"])
def test_stage_two_follows_the_gradient_of_the_loss(c: float, encoder_normalizer: str, amortizes: str) -> None:
    """The loss and its gradients for the features and for theta = log(1/tau) match autograd, with rho included.

    If the net predicts the sum over negatives only, the batch's positives are added to its prediction. The released
    code's gradients are also those of the loss: unlike FastCLIP-v3's, they count tau's data term once.
    """
    options = {"encoder_normalizer": encoder_normalizer, "amortizes": amortizes, "ema": 0.5, "target_every": 1}
    options |= {"lr": 0.05}
    for tau, chunk, reference in ((0.02, None, "paper"), (0.2, 5, "paper"), (0.07, None, "released_code")):
        image, text = (x.requires_grad_() for x in pairs(17, DIM))
        loss_fn = amorlip(
            tau, rho=3.0, common={"chunk_size": chunk, "reference": reference}, positive_weight=c, **options
        )
        result = call(loss_fn, image, text)
        target = predict(net_of(loss_fn, "target"), image, text)
        log_lambda = target if encoder_normalizer == "ema" else log_partition(image, text, tau, c)
        if amortizes == "negatives" and encoder_normalizer == "ema":
            log_lambda = (target.exp() + c / 16 * ((image * text).sum(1).detach() / tau).exp()).log()
        theta = torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)
        expected_loss = oracle.amorlip(image, text, (-theta).exp(), log_lambda, c, rho=3.0)
        image_gradient, text_gradient, theta_gradient = torch.autograd.grad(expected_loss, (image, text, theta))
        assert relative_error(result.image, image_gradient) < EXACT
        assert relative_error(result.text, text_gradient) < EXACT
        assert relative_error(scalar_gradients(loss_fn)["theta"], theta_gradient) < 1e-12
        assert float(result.loss) == pytest.approx(float(expected_loss.detach()), rel=1e-10)


@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
def test_stage_two_is_accurate_in_float32_at_the_coldest_temperature(encoder_normalizer: str) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        loss_fn = amorlip(0.01, encoder_normalizer=encoder_normalizer, dtype=dtype)
        for number in range(3):
            image, text = pairs(32, DIM, seed=number)
            result = call(loss_fn, image.to(dtype), text.to(dtype), at=position(number, epoch=number))
        results.append(result)
    assert relative_error(results[0].image.double(), results[1].image) < 1e-3
    assert relative_error(results[0].text.double(), results[1].text) < 1e-3


@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
def test_the_estimate_that_is_evaluated_is_the_one_in_use(encoder_normalizer: str) -> None:
    loss_fn = amorlip(encoder_normalizer=encoder_normalizer, positive_weight=0.3)
    image, text = pairs(9, DIM)
    assert torch.isneginf(loss_fn.log_normalizers(image, text)).all(), "no net yet"
    call(loss_fn, image, text)
    log_estimate = loss_fn.log_normalizers(image, text)
    log_lambda = log_partition(image, text, TAU, 0.3)
    if encoder_normalizer == "ema":
        log_lambda = predict(net_of(loss_fn, "target"), image, text)
    negatives = (log_lambda - (image * text).sum(1) / TAU).exp() - 0.3 / 8  # without the positive's term
    torch.testing.assert_close(log_estimate, negatives.clamp(min=0).log(), rtol=EXACT, atol=EXACT)
    assert torch.isfinite(log_estimate).any()


def test_rho_counts_once_and_is_annealed() -> None:
    image, text = pairs(9, DIM)
    without_rho = amorlip()
    annealed = amorlip(rho=[8.0, -8.0])
    rhos = []
    for progress in (0.0, 0.49, 0.5, 0.99):
        at = replace(position(), progress=progress)
        with torch.no_grad():
            difference = annealed(image, text, position=at) - without_rho(image, text, position=at)
        rhos.append(float(difference) / TAU)
    assert rhos == pytest.approx([8, 8, -8, -8])


@pytest.mark.parametrize("reference", ["paper", "released_code"])
@pytest.mark.parametrize("encoder_normalizer", ["ema", "combined"])
@pytest.mark.parametrize("fitting_loss", ["l2_log", "kl", "js"])
def test_all_values_are_finite_in_float32_at_low_temperatures(
    reference: str, encoder_normalizer: str, fitting_loss: str
) -> None:
    """New nets miss log C by up to 300, so that C/lambda overflows float32."""
    for tau in (0.003, 0.01):
        loss_fn = build_loss(
            "amorlip",
            dim=DIM,
            dtype=torch.float32,
            temperature={"initial": tau, "minimum": 0.003, "rho": 2.0},
            reference=reference,
            amortized={"encoder_normalizer": encoder_normalizer, "loss": fitting_loss},
        )
        for number in range(5):
            image, text = (x.float() for x in pairs(32, DIM, seed=number, likeness=(-1) ** number))
            result = call(loss_fn, image, text, at=position(number, epoch=number // 3))
            assert all(value.isfinite().all() for value in result.tensors())
        assert all(value.isfinite().all() for value in replicated_state(loss_fn).values())
