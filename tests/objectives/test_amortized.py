"""AmorLIP's stage II against autograd of its loss, and the method as a part of a run."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from amortization import DIM, EXACT, TAU, amorlip, log_partition, net_of, predict
from build import batch, objective, pairs, relative_error, step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_ds.distributed.communicator import Communicator


def captured(method: Any, monkeypatch: pytest.MonkeyPatch, features: Any, at: Any) -> tuple[Any, Tensor]:
    """The objective's answer and d loss / d theta."""
    seen: list[Tensor] = []
    monkeypatch.setattr(method._temperature, "descend", lambda _, theta: seen.append(theta))
    return method(features, at), seen[-1]


@pytest.mark.parametrize("c", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("stage2", ["ema", "combined"])
@pytest.mark.parametrize("tau", [0.02, 0.2])
@pytest.mark.parametrize("chunk", [None, 5])
def test_stage_two(c: float, stage2: str, tau: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, its feature gradients and its gradient by theta = log(1/tau), rho included."""
    image, text = (x.requires_grad_() for x in pairs(17, DIM))
    method = amorlip(tau, rho=3.0, positive_weight=c, stage2=stage2, ema=0.5, target_every=1, lr=0.05)
    method._config = method._config.model_copy(update={"chunk": chunk})
    found, grad_theta = captured(method, monkeypatch, batch(image.detach(), text.detach()), step())
    target = predict(net_of(method, "target"), image, text)
    log_lambda = target if stage2 == "ema" else log_partition(image, text, tau, c)
    theta = torch.tensor(-math.log(tau), dtype=torch.float64, requires_grad=True)
    loss = oracle.amorlip(image, text, (-theta).exp(), log_lambda, c, rho=3.0)
    wanted = torch.autograd.grad(loss, (image, text, theta))
    for value, exact in zip((found.image, found.text, grad_theta), wanted, strict=True):
        assert relative_error(value, exact) < EXACT
    assert float(found.loss) == pytest.approx(float(loss.detach()), rel=1e-10)


def test_combined_in_the_first_epoch_is_openclip() -> None:
    """lambda = C with c = 1 is the batch's softmax: 2 tau times the gradient of OpenCLIP's loss, which has a half."""
    features = batch(*pairs(17, DIM))
    found = amorlip(stage2="combined")(features, step())
    wanted = objective("openclip", Communicator(), DIM, temperature={"initial": TAU})(features, step())
    assert relative_error(found.image, 2 * TAU * wanted.image) < EXACT
    assert relative_error(found.text, 2 * TAU * wanted.text) < EXACT


@pytest.mark.parametrize("stage2", ["ema", "combined"])
def test_stage_two_in_float32_at_the_coldest_temperature(stage2: str) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        method = amorlip(0.01, stage2=stage2, dtype=dtype)
        for number in range(3):
            image, text = pairs(32, DIM, seed=number)
            found = method(batch(image.to(dtype), text.to(dtype)), step(number, epoch=number))
        results.append(found)
    assert relative_error(results[0].image.double(), results[1].image) < 1e-3
    assert relative_error(results[0].text.double(), results[1].text) < 1e-3


@pytest.mark.parametrize("stage2", ["ema", "combined"])
def test_the_estimate_that_is_evaluated_is_the_one_in_use(stage2: str) -> None:
    method = amorlip(stage2=stage2, positive_weight=0.3)
    image, text = pairs(9, DIM)
    features = batch(image, text)
    assert torch.isneginf(method.log_normalizers(features)[0]).all(), "no net yet"
    method(features, step(0))
    before = {key: value.clone() for key, value in method.replicated_state().items()}
    log_estimate, _ = method.log_normalizers(features)
    log_lambda = log_partition(image, text, TAU, 0.3)
    if stage2 == "ema":
        log_lambda = predict(net_of(method, "target"), image, text)
    torch.testing.assert_close(log_estimate, log_lambda - (image * text).sum(1) / TAU, rtol=EXACT, atol=EXACT)
    for key, value in method.replicated_state().items():
        assert torch.equal(before[key], value), key


def test_rho_counts_once_and_is_annealed() -> None:
    rule = amorlip(rho=[8.0, -8.0])._temperature
    assert [2 * rule.rho(step()._replace(progress=share)) for share in (0.0, 0.49, 0.5, 0.99)] == [8, 8, -8, -8]


@pytest.mark.parametrize("stage2", ["ema", "combined"])
def test_rows_that_do_not_count_change_nothing(stage2: str) -> None:
    image, text = pairs(12, DIM)
    valid, index = torch.tensor([True, False, True] * 4), torch.arange(12)
    poisoned_image, poisoned_text = image.clone(), text.clone()
    poisoned_image[~valid], poisoned_text[~valid] = math.nan, math.inf
    with_holes, without = amorlip(stage2=stage2), amorlip(stage2=stage2)
    for number in range(3):
        holes = with_holes(batch(poisoned_image, poisoned_text, index, valid), step(number, epoch=number // 2))
        clean = without(batch(image[valid], text[valid], index[valid]), step(number, epoch=number // 2))
    assert torch.equal(holes.image[valid], clean.image)
    assert torch.equal(holes.text[valid], clean.text)
    assert not holes.image[~valid].any()
    for key, value in without.replicated_state().items():
        assert torch.equal(with_holes.replicated_state()[key], value)


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_state_round_trip(steps: int) -> None:
    """Within the first epoch, before and after an epoch's end: what follows is the same to the last bit."""
    options = {"dtype": torch.float32, "stage2": "combined", "online_every": 2, "target_every": 2, "loss": "js"}
    method, fresh = (amorlip(**options) for _ in range(2))  # type: ignore[arg-type]
    rows = [batch(*(x.float() for x in pairs(9, DIM, seed=number))) for number in range(8)]
    for number in range(steps):
        method(rows[number], step(number, epoch=number // 3))
    fresh.load_replicated_state({key: value.clone() for key, value in method.replicated_state().items()})
    for number in range(steps, 8):
        one, other = (built(rows[number], step(number, epoch=number // 3)) for built in (method, fresh))
        assert torch.equal(one.image, other.image)
    assert method.replicated_state().keys() == fresh.replicated_state().keys()
    for key, value in method.replicated_state().items():
        assert torch.equal(fresh.replicated_state()[key], value), key


class Reads(TorchDispatchMode):
    """Counts tensors that are read by the program, which on a GPU waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [8, 64])
def test_nothing_is_read_from_the_device(rows: int) -> None:
    method = amorlip(updates=3, loss="kl")
    features = batch(*pairs(rows, DIM))
    whole, estimates = Reads(), []
    estimate, reads_ahead = method._normalizer.__call__, method._normalizer.prefetch
    reads = Reads()

    class Watched:
        prefetch = reads_ahead

        def __call__(self, *arguments: Any) -> Any:
            with reads:
                estimates.append(estimate(*arguments))
            return estimates[-1]

    method._normalizer = Watched()
    with whole:
        for epoch in range(2):
            method(features, step(epoch, epoch=epoch))
    assert whole.count > 0, "reads are seen"
    assert reads.count == 0


@pytest.mark.parametrize("tau", [0.003, 0.01])
@pytest.mark.parametrize("start", ["batch_mean", "released_code"])
@pytest.mark.parametrize("stage2", ["ema", "combined"])
@pytest.mark.parametrize("loss", ["l2_log", "kl", "js"])
def test_float32_at_low_temperatures(tau: float, start: str, stage2: str, loss: str) -> None:
    """New nets miss log C by up to 300, and C/lambda is beyond float32: all stays finite."""
    method = objective(
        "amorlip", Communicator(), DIM, torch.float32,
        temperature={"initial": tau, "minimum": 0.003, "rho": 2.0},
        amortized={"start": start, "stage2": stage2, "loss": loss},
    )  # fmt: skip
    for number in range(5):
        image, text = (x.float() for x in pairs(32, DIM, seed=number, likeness=(-1) ** number))
        found = method(batch(image, text), step(number, epoch=number // 3))
        assert all(torch.isfinite(x).all() for x in (found.image, found.text, found.loss, *found.metrics.values()))
    assert all(torch.isfinite(value).all() for value in method.replicated_state().values())


def test_the_ratio_is_bounded() -> None:
    """C/lambda is at most max_ratio, as if lambda were C/max_ratio where it is less."""
    method = amorlip(max_ratio=1.01, updates=0)
    image, text = (x.requires_grad_() for x in pairs(12, DIM))
    found = method(batch(image.detach(), text.detach()), step())
    log_total = log_partition(image, text, TAU, 1.0)
    log_lambda = torch.maximum(predict(net_of(method, "target"), image, text), log_total - math.log(1.01))
    raised = log_lambda == log_total - math.log(1.01)
    assert raised.any()
    assert not raised.all()
    loss = oracle.amorlip(image, text, torch.tensor(TAU, dtype=torch.float64), log_lambda, 1.0, 0.0)
    by_image, by_text = torch.autograd.grad(loss, (image, text))
    assert relative_error(found.image, by_image) < EXACT
    assert relative_error(found.text, by_text) < EXACT
    assert float(found.metrics["amortization_ratio"]) <= 1.01
