"""Check properties that every method must have, with each set of the method's test options."""

import math
from typing import Any

import oracle
import pytest
import torch
from build import STILL, VARIANTS, Result, build_loss, call, columns, pairs, position, relative_error, replicated_state
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.losses import ContrastiveLoss, global_contrastive
from neuclip_ds.losses import pairs as pairs_module
from neuclip_ds.losses.global_contrastive import GlobalContrastiveLoss, NormalizerOutput
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.losses.pairs import CACHED_BYTES
from neuclip_ds.section import merge

every_method = pytest.mark.parametrize("name", VARIANTS)


def build(name: str, tau: float = 0.07, dtype: torch.dtype = torch.float64, **changes: Any) -> ContrastiveLoss:
    method, options = VARIANTS[name]
    options = merge(options, {"temperature": {"initial": tau, "rho": 2.0, "lr": 1e-2}, **changes})
    return build_loss(method, dtype=dtype, **options)


def force_factors(monkeypatch: pytest.MonkeyPatch, factors: bool) -> None:
    """Choose between the arithmetic of CPUs, where it is possible, and that of GPUs."""
    monkeypatch.setattr(pairs_module, "factors_exponentials", lambda device_type: factors)


def table_tensors(loss_fn: ContrastiveLoss) -> dict[str, Tensor]:
    """Return copies of the tables of the state."""
    tensors: dict[str, Tensor] = {}
    for name, table in loss_fn.function.row_tables().items():
        for key, values in table.tensors.items():
            tensors[f"{name}/{key}"] = values.clone()
    return tensors


def state_tensors(loss_fn: ContrastiveLoss) -> dict[str, Tensor]:
    """Return copies of all tensors of the state."""
    return replicated_state(loss_fn) | table_tensors(loss_fn)


def individual_temperatures(loss_fn: ContrastiveLoss, size: int) -> Tensor | None:
    """Return copies of the (2, size) temperatures of the first samples, or None if all samples share one."""
    tables = loss_fn.function.row_tables()
    if "temperatures" not in tables:
        return None
    taus = columns(tables["temperatures"])
    return torch.stack([taus["tau_image"], taus["tau_text"]])[:, :size]


def test_the_default_method_is_that_of_recipes() -> None:
    assert ContrastiveLoss(dim=4).config == Config().objective
    assert ContrastiveLoss(dim=4).config.method == "openclip"


@pytest.mark.parametrize(
    "name", [name for name, (method, _) in VARIANTS.items() if METHODS[method].estimates_normalizers]
)
def test_the_feature_gradient_is_that_of_the_weighted_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is that of scale/B sum w g, with the estimator's weights w, plus the estimator's own gradient.

    It is computed with the arithmetic of CPUs and, in the last case, with that of GPUs.
    """
    for tau, size, chunk, cached_bytes, factors in (
        (0.01, 9, None, CACHED_BYTES, True),
        (1.0, 14, 4, 0, True),
        (0.07, 14, 4, CACHED_BYTES, False),
    ):
        force_factors(monkeypatch, factors)
        monkeypatch.setattr(global_contrastive, "CACHED_BYTES", cached_bytes)
        check_weighted_pairs(build(name, tau, chunk_size=chunk), size, monkeypatch)


def check_weighted_pairs(loss_fn: ContrastiveLoss, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function: Any = loss_fn.function
    assert isinstance(function, GlobalContrastiveLoss)
    outputs: list[NormalizerOutput] = []
    estimator_class: Any = type(function._estimator)
    estimate_normalizers = estimator_class.__call__

    def recorded(*arguments: Any) -> NormalizerOutput:
        output: NormalizerOutput = estimate_normalizers(*arguments)
        outputs.append(output)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(estimator_class, "__call__", recorded)
        for number in range(2):
            image, text = (x.requires_grad_() for x in pairs(size, 6, seed=number))
            individual_taus = individual_temperatures(loss_fn, size)
            result = call(loss_fn, image, text, at=position(number, epoch=number))
            output = outputs[-1]
            taus = result.metrics["tau"] if individual_taus is None else individual_taus
            pair_loss = function.pair_loss
            hinge = None if pair_loss.is_identity else pair_loss.margin
            log_mean = torch.stack([oracle.log_mean_exp(x) for x in oracle.logits(image, text, taus, hinge)])
            log_g = log_mean + math.log((size - 1) / (size - pair_loss.divisor_offset))
            scale = function._scale(taus)
            loss = (scale * output.log_weight.exp() * log_g.exp()).mean(1).sum()
            image_gradient, text_gradient = torch.autograd.grad(loss, (image, text))
            if output.feature_grad is not None:
                image_gradient = image_gradient + scale * output.feature_grad[0]
                text_gradient = text_gradient + scale * output.feature_grad[1]
            assert relative_error(result.image, image_gradient) < 1e-10
            assert relative_error(result.text, text_gradient) < 1e-10


@every_method
def test_a_cpu_and_a_gpu_compute_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, metrics and the state's tables agree up to rounding, whichever arithmetic computes the pairs.

    Networks are compared by their effect on later steps: where a weight's gradient is zero, Adam magnifies rounding.
    """
    results: list[list[Result]] = []
    tables: list[dict[str, Tensor]] = []
    for factors in (True, False):
        force_factors(monkeypatch, factors)
        loss_fn = build(name)
        results.append([])
        for number in range(4):
            result = call(loss_fn, *pairs(12, 6, seed=number), at=position(number, epoch=number // 2))
            results[-1].append(result)
        tables.append(table_tensors(loss_fn))
    for cpu, gpu in zip(*results, strict=True):
        for cpu_value, gpu_value in zip(cpu.tensors(), gpu.tensors(), strict=True):
            torch.testing.assert_close(cpu_value, gpu_value, rtol=1e-9, atol=1e-12)
    for key, value in tables[0].items():
        torch.testing.assert_close(value, tables[1][key], rtol=1e-9, atol=1e-12)


@every_method
def test_rows_that_do_not_count_change_nothing(name: str) -> None:
    """Invalid rows get a zero gradient, even if they contain NaN or inf, and do not affect any other result."""
    image, text = pairs(12, 6)
    valid = torch.tensor([True, False, True] * 4)
    poisoned_image = image.clone()
    poisoned_text = text.clone()
    poisoned_image[~valid] = math.nan
    poisoned_text[~valid] = math.inf
    with_invalid_rows = build(name)
    without = build(name)
    index = torch.arange(12)
    for number in range(3):
        padded = call(with_invalid_rows, poisoned_image, poisoned_text, index, valid, at=position(number))
        compact = call(without, image[valid], text[valid], index[valid], at=position(number))
    assert torch.equal(padded.loss, compact.loss)
    assert torch.equal(padded.image[valid], compact.image)
    assert torch.equal(padded.text[valid], compact.text)
    assert not padded.image[~valid].any()
    assert not padded.text[~valid].any()
    state = state_tensors(with_invalid_rows)
    for key, value in state_tensors(without).items():
        assert torch.equal(state[key], value), key


@every_method
def test_an_undone_step_leaves_no_trace(name: str) -> None:
    """Undone steps, even the first of an epoch or one with NaN, have no effect on the state after later steps."""
    undone = build(name)
    without = build(name)
    for number, poison in ((0, None), (1, None), (2, 1.0), (3, math.nan), (4, None), (5, None)):
        image, text = pairs(12, 6, seed=number)
        index = torch.arange(12) + number
        at = position(number, epoch=number // 3)
        if poison is not None:
            call(undone, image * poison, text, index, at=at)
            undone.undo()
            continue
        for loss_fn in (undone, without):
            call(loss_fn, image, text, index, at=at)
    state = state_tensors(undone)
    expected = state_tensors(without)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


@every_method
def test_float32_is_accurate_at_the_coldest_temperature(name: str) -> None:
    """At tau = 0.01, with negatives 1.9 above positives (exponents of 190), gradients match float64 to within 1e-4."""
    image, text = pairs(48, 6, likeness=0.3)
    text[:4] = -image[:4] * 0.95 + text[:4] * 0.05  # positives far apart ...
    text[4:8] = image[:4]  # ... and a negative that is identical
    text = normalize(text, dim=1)
    results: list[list[Result]] = []
    for dtype in (torch.float32, torch.float64):
        # inner optimizers are excluded; test_npn.py and test_amortized_fit.py test them
        loss_fn = build(name, 0.01, dtype, **STILL.get(VARIANTS[name][0], {}))
        results.append([])
        for number in range(2):
            results[-1].append(call(loss_fn, image.to(dtype), text.to(dtype), at=position(number, lr=0.0)))
    for single, double in zip(*results, strict=True):
        assert torch.isfinite(single.image).all()
        assert torch.isfinite(single.text).all()
        assert relative_error(single.image.double(), double.image) < 1e-4
        assert relative_error(single.text.double(), double.text) < 1e-4
