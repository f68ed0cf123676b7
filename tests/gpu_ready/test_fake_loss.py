"""The loss of other training loops, on one GPU: without validation a call and its backward pass wait for nothing."""

from __future__ import annotations

import costs
import pytest
import torch
from fake_cuda import DEVICE, fake_cuda

from neuclip_ds.loss import ContrastiveLoss
from neuclip_ds.objectives import METHODS

ROWS, DIM, SAMPLES = 12, 6, 100


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("name", ["openclip", "fastclip_v3"])
def test_a_call_and_its_backward_pass(name: str, validate: bool) -> None:
    with fake_cuda() as gpu:
        options = METHODS[name].test_options[""]
        schedule = {"dim": DIM, "samples": SAMPLES, "epochs": 3, "steps_per_epoch": 100}
        loss_fn = ContrastiveLoss(name, **schedule, device=DEVICE, validate=validate, **options)
        for _ in range(2):
            gpu.reset()
            image, text = (torch.empty(ROWS, DIM, device=DEVICE, requires_grad=True) for _ in range(2))
            loss_fn(image, text, torch.arange(ROWS)).backward()
        costs.check("loss", f"{name}{', validated' if validate else ''}", 1, gpu)
        assert image.grad is not None and image.grad.device == DEVICE
