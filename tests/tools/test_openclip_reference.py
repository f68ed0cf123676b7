"""OpenCLIP's communication scheme gives the results of the `openclip` method but also sends B x d gradients."""

from typing import Any

import pytest
import torch
from benchmarking.openclip_reference import OpenClipReference
from build import SAMPLES, batch, objective, pairs, step
from ranks import run_ranks

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.base import Context, Objective

ROWS = 12
DIM = 6
STEPS = 3


def descend(built: Objective, communicator: Communicator) -> dict[str, Any]:
    """Run several steps; return their gradients, losses and temperatures, and the bytes sent for each purpose."""
    share = ROWS // communicator.world_size
    mine = slice(communicator.rank * share, (communicator.rank + 1) * share)
    results = []
    communicator.traffic.clear()
    for number in range(STEPS):
        image, text = pairs(ROWS, DIM, seed=number)
        result = built(batch(image[mine], text[mine]), step(number, lr=0.05))
        results.append(torch.cat([result.image, result.text]))
        results.append(torch.stack([result.loss, result.metrics["tau"], result.metrics["feature_grad_norm"]]))
    received = {purpose: traffic.bytes_sent for purpose, traffic in communicator.traffic.items()}
    return {"results": results, "received": received}


def schemes(communicator: Communicator) -> tuple[dict[str, Any], ...]:
    """Run the `openclip` method, then the reference."""
    config = Config.model_validate({"optimizer": {"eps": 1e-8}})
    context = Context(DIM, SAMPLES, communicator, torch.float64)
    built = [objective("openclip", communicator, DIM), OpenClipReference(config, context, torch.float64)]
    return tuple(descend(one, communicator) for one in built)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_gives_openclips_gradients_and_also_sends_them(world_size: int) -> None:
    ranks = run_ranks(world_size, schemes) if world_size > 1 else [schemes(Communicator())]
    for ours, theirs in ranks:
        assert "feature gradients" not in ours["received"]
        for mine, wanted in zip(ours["results"], theirs["results"], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)
        features = (world_size - 1) * STEPS * ROWS // world_size * 2 * DIM * 8
        for purpose in ("features", "feature gradients"):
            assert theirs["received"].get(purpose, 0) == features


def test_rows_that_do_not_count_are_refused() -> None:
    context = Context(DIM, SAMPLES, Communicator(), torch.float64)
    built = OpenClipReference(Config(), context, torch.float64)
    image, text = pairs(4, DIM)
    with pytest.raises(ValueError, match="valid"):
        built(batch(image, text, valid=torch.tensor([True, True, False, True])), step())
