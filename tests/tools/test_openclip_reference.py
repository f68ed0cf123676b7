"""OpenCLIP's communication scheme gives the results of the `openclip` method but also sends B x d gradients."""

from typing import Any

import pytest
import torch
from benchmarking.openclip_reference import OpenClipReference
from benchmarking.run_loss import StepLoss, build_loss
from ranks import run_ranks
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Position

ROWS = 12
DIM = 6
STEPS = 3
SAMPLES = 1000


def descend(loss: StepLoss, communicator: Communicator) -> dict[str, Any]:
    """Run several steps; return their gradients, losses and temperatures, and the bytes sent for each purpose."""
    rows = ROWS // communicator.world_size
    local = slice(communicator.rank * rows, (communicator.rank + 1) * rows)
    results: list[torch.Tensor] = []
    communicator.traffic.clear()
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        image, text = normalize(torch.randn(2, ROWS, DIM, generator=generator), dim=-1)
        image = image[local].clone().requires_grad_()
        text = text[local].clone().requires_grad_()
        pending = loss.begin(torch.arange(ROWS)[local], None, Position(step=number, lr=0.05, peak_lr=0.05))
        pending.add_text(text)
        pending.add_image(image)
        pending.begin_reads()
        value = loss(image, text, pending=pending)
        assert loss.feature_gradient_norm is not None
        results.extend(torch.autograd.grad(value, [image, text]))
        results.append(torch.stack([value.detach(), loss.metric_tensors["tau"], loss.feature_gradient_norm]))
    received = {purpose: traffic.bytes_sent for purpose, traffic in communicator.traffic.items()}
    return {"results": results, "received": received}


def run_both(communicator: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the `openclip` method, then the reference."""
    ours = build_loss(Config(), DIM, SAMPLES, communicator, torch.float32)
    reference = OpenClipReference(Config(), DIM, SAMPLES, communicator, torch.float32)
    return descend(ours, communicator), descend(reference, communicator)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_has_the_gradients_and_the_temperature_of_openclip(world_size: int) -> None:
    ranks = run_ranks(world_size, run_both) if world_size > 1 else [run_both(Communicator())]
    for ours, reference in ranks:
        assert "feature gradients" not in ours["received"]
        for expected, result in zip(ours["results"], reference["results"], strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        bytes_of_features = (world_size - 1) * STEPS * ROWS // world_size * 2 * DIM * 4
        for purpose in ("features", "feature gradients"):
            assert reference["received"].get(purpose, 0) == bytes_of_features


def test_a_skipped_step_leaves_the_temperature_as_it_was() -> None:
    loss = OpenClipReference(Config(), DIM, SAMPLES, Communicator(), torch.float32)
    first = descend(loss, Communicator())["results"]
    loss.undo()
    again = descend(loss, Communicator())["results"]
    tau_before_last_step = first[-1][1]
    assert torch.equal(again[2][1], tau_before_last_step)


def test_batches_with_invalid_rows_are_refused() -> None:
    loss = OpenClipReference(Config(), DIM, SAMPLES, Communicator(), torch.float32)
    with pytest.raises(ValueError, match="valid"):
        loss.begin(torch.arange(3), torch.tensor([True, False, True]), Position(step=0, lr=0.1, peak_lr=0.1))
