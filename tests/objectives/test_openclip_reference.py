"""OpenCLIP's own communication scheme computes what the method `openclip` does, and sends B x d gradients besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build import SAMPLES, batch, objective, pairs, step
from ranks import run_ranks

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives.base import Context, Objective
from neuclip_ds.objectives.openclip_reference import OpenClipReference

ROWS, DIM, STEPS = 12, 6, 3


def descend(built: Objective, communicator: Communicator) -> dict[str, Any]:
    """Gradients, losses and temperatures of some steps, and what they sent."""
    share = ROWS // communicator.world_size
    mine = slice(communicator.rank * share, (communicator.rank + 1) * share)
    found = []
    communicator.traffic.clear()
    for number in range(STEPS):
        image, text = pairs(ROWS, DIM, seed=number)
        result = built(batch(image[mine], text[mine]), step(number, lr=0.05))
        found.append(torch.cat([result.image, result.text]))
        found.append(torch.stack([result.loss, result.metrics["tau"], result.metrics["feature_grad_norm"]]))
    received = {purpose: of.bytes_received for purpose, of in communicator.traffic.items()}
    return {"found": found, "received": received}


def both_schemes(communicator: Communicator, local_loss: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    config = Config.model_validate({"optimizer": {"eps": 1e-8}})
    context = Context(DIM, SAMPLES, communicator, torch.float64)
    reference = OpenClipReference(config, context, torch.float64, local_loss)
    return descend(objective("openclip", communicator, DIM), communicator), descend(reference, communicator)


@pytest.mark.parametrize("local_loss", [True, False])
def test_same_gradients(local_loss: bool) -> None:
    for ours, theirs in run_ranks(2, both_schemes, local_loss):
        for mine, wanted in zip(ours["found"], theirs["found"], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)
        features = STEPS * ROWS // 2 * 2 * DIM * 8
        assert theirs["received"]["features"] == theirs["received"]["feature gradients"] == features
        assert "feature gradients" not in ours["received"]


def test_one_rank() -> None:
    ours, theirs = both_schemes(Communicator(), local_loss=True)
    for mine, wanted in zip(ours["found"], theirs["found"], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


def test_rows_that_do_not_count_are_refused() -> None:
    context = Context(DIM, SAMPLES, Communicator(), torch.float64)
    built = OpenClipReference(Config(), context, torch.float64, local_loss=True)
    image, text = pairs(4, DIM)
    with pytest.raises(ValueError, match="valid"):
        built(batch(image, text, valid=torch.tensor([True, True, False, True])), step())
