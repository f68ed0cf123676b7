"""Check properties that every method must have, with each set of the method's test options."""

import math
from typing import Any

import oracle
import pytest
import torch
from build import STILL, VARIANTS, batch, objective, pairs, relative_error, step
from neuclip_ds.objectives import METHODS, contrastive
from neuclip_ds.objectives.contrastive import ContrastiveObjective

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import NormalizerOutput, Objective
from neuclip_ds.losses.gather import GatheredFeatures
from neuclip_ds.losses.pairs import Hinge
from neuclip_ds.section import merge

every_method = pytest.mark.parametrize("name", VARIANTS)


def build(name: str, tau: float = 0.07, dtype: torch.dtype = torch.float64, **changes: Any) -> Objective:
    method, options = VARIANTS[name]
    options = merge(options, {"temperature": {"initial": tau, "rho": 2.0, "lr": 1e-2}, **changes})
    return objective(method, Communicator(), 6, dtype, **options)


@pytest.mark.parametrize("name", [name for name, (method, _) in VARIANTS.items() if METHODS[method].normalizer])
@pytest.mark.parametrize("tau", [0.01, 0.07, 1.0])
@pytest.mark.parametrize(("size", "chunk", "kept"), [(9, None, 1e8), (14, 4, 1e8), (14, 4, 0)])
def test_feature_gradient_is_that_of_the_weighted_pairs(
    name: str, tau: float, size: int, chunk: int | None, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is that of scale/B sum w g, with the normalizer's weights w, plus the normalizer's own gradient."""
    monkeypatch.setattr(contrastive, "KEPT_BYTES", kept)
    method = build(name, tau, chunk_size=chunk)
    assert isinstance(method, ContrastiveObjective)
    seen: list[NormalizerOutput] = []
    normalizer: Any = method._normalizer

    class Recorded:
        prefetch, gathers = normalizer.prefetch, normalizer.gathers

        def __call__(self, *arguments: Any) -> NormalizerOutput:
            seen.append(normalizer(*arguments))
            return seen[-1]

    method._normalizer = Recorded()  # type: ignore[assignment]
    for number in range(3):
        image, text = (x.requires_grad_() for x in pairs(size, 6, seed=number))
        features = batch(image.detach(), text.detach())
        taus = method._temperature.of(
            GatheredFeatures(features, Communicator(), torch.float64, method._temperature.prefetch)
        )
        found = method(features, step(number, epoch=number))
        is_hinge = isinstance(method.pair_loss, Hinge)
        hinge = method.pair_loss.margin if is_hinge else None
        log_g = [oracle.log_mean_exp(x) for x in oracle.logits(image, text, taus, hinge)]
        divisor = math.log((size - 1) / (size - method.pair_loss.excluded))
        weight = method._scale(taus) * seen[-1].log_weight.exp()
        loss = (weight * (torch.stack(log_g) + divisor).exp()).mean(1).sum()
        wanted = list(torch.autograd.grad(loss, (image, text)))
        if seen[-1].feature_grad is not None:
            wanted = [a + method._scale(taus) * b for a, b in zip(wanted, seen[-1].feature_grad, strict=True)]
        assert relative_error(found.image, wanted[0]) < 1e-10
        assert relative_error(found.text, wanted[1]) < 1e-10


@every_method
def test_rows_that_do_not_count_change_nothing(name: str) -> None:
    """Invalid rows get a zero gradient, even if they contain NaN or inf, and do not affect any other result."""
    image, text = pairs(12, 6)
    valid = torch.tensor([True, False, True] * 4)
    poisoned_image, poisoned_text = image.clone(), text.clone()
    poisoned_image[~valid], poisoned_text[~valid] = math.nan, math.inf
    with_holes, without = build(name), build(name)
    index = torch.arange(12)
    for number in range(3):
        holes = with_holes(batch(poisoned_image, poisoned_text, index, valid), step(number))
        clean = without(batch(image[valid], text[valid], index[valid]), step(number))
    assert torch.equal(holes.image[valid], clean.image)
    assert torch.equal(holes.text[valid], clean.text)
    assert not holes.image[~valid].any()
    assert not holes.text[~valid].any()
    for key, value in without.replicated_state().items():
        assert torch.equal(with_holes.replicated_state()[key], value)


@every_method
@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_a_restored_step_leaves_no_trace(name: str, poison: float) -> None:
    """An undone step, even the first of an epoch, has no effect on the state after later steps."""
    restored, without = build(name), build(name)
    for number in range(6):
        image, text = pairs(12, 6, seed=number)
        if number in (2, 3):
            restore = restored.restore_point()
            restored(batch(image * poison, text, torch.arange(12) + number), step(number, epoch=number // 3))
            restore()
            continue
        features = batch(image, text, torch.arange(12) + number)
        for method in (restored, without):
            method(features, step(number, epoch=number // 3))
    state, wanted = restored.replicated_state(), without.replicated_state()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key
    for key, table in without.row_tables().items():
        for part, rows in table.tensors.items():
            assert torch.equal(restored.row_tables()[key].tensors[part], rows), (key, part)


@every_method
def test_float32_at_the_coldest_temperature(name: str) -> None:
    """At tau = 0.01, with negatives 1.9 above positives (exponents of 190), gradients match float64 to within 1e-4."""
    image, text = pairs(48, 6, likeness=0.3)
    text[:4] = -image[:4] * 0.95 + text[:4] * 0.05  # positives far apart ...
    text[4:8] = image[:4]  # ... and a negative that is identical
    text = torch.nn.functional.normalize(text, dim=1)
    results = []
    for dtype in (torch.float32, torch.float64):
        # inner optimizers are excluded; tests/objectives/test_npn.py and test_amortized_fit.py test them
        built = build(name, 0.01, dtype, **STILL.get(VARIANTS[name][0], {}))
        for number in range(2):
            results.append(built(batch(image.to(dtype), text.to(dtype)), step(number, lr=0.0)))
    for single, double in zip(results[:2], results[2:], strict=True):
        assert torch.isfinite(single.image).all()
        assert torch.isfinite(single.text).all()
        assert relative_error(single.image.double(), double.image) < 1e-4
        assert relative_error(single.text.double(), double.text) < 1e-4
