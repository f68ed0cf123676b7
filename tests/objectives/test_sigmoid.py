"""SigLIP's closed form against float64 autograd of the loss as it is written."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from build import batch, objective, pairs, relative_error, step, with_scalar_gradients

from neuclip_ds.distributed.communicator import Communicator


def siglip(tau: float, **options: Any) -> Any:
    return objective("siglip", Communicator(), 5, temperature={"initial": tau}, **options)


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("bias", [-10.0, 0.0, 3.0])
@pytest.mark.parametrize(("size", "chunk"), [(2, None), (33, 5), (33, None)])
def test_features_temperature_and_bias(tau: float, bias: float, size: int, chunk: int | None) -> None:
    image, text = (x.requires_grad_() for x in pairs(size, 5))
    theta, offset = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (-math.log(tau), bias))
    loss = oracle.siglip(image, text, (-theta).exp(), offset)
    wanted = torch.autograd.grad(loss, (image, text, theta, offset))
    method = siglip(tau, siglip={"bias": bias}, chunk_size=chunk)
    found, seen = with_scalar_gradients(method, batch(image.detach(), text.detach()), step())
    for value, target in zip((found.image, found.text, seen["theta"], seen["bias"]), wanted, strict=True):
        assert relative_error(value, target) < 1e-10
    assert float(found.loss) == pytest.approx(float(loss), rel=1e-12)


def test_both_scalars_are_learned_within_bounds() -> None:
    method = siglip(0.1)
    for number in range(3):
        found = method(batch(*pairs(8, 5, seed=number)), step(number))
    assert float(found.metrics["bias"]) != -10.0
    assert float(found.metrics["tau"]) != 0.1
