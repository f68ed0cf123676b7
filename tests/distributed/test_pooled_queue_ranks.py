"""The queue's normalizer in float32 at a low temperature: two real ranks compute what one computes."""

from __future__ import annotations

from typing import Any

import torch
from build import batch, objective, relative_error, step
from ranks import run_ranks
from torch.nn.functional import normalize

from neuclip_ds.distributed.communicator import Communicator

ROWS, DIM, STEPS = 128, 32, 8


def clustered(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, dim) images and texts in sixteen narrow clusters."""
    generator = torch.Generator().manual_seed(number)
    places = torch.randn(16, DIM, generator=torch.Generator().manual_seed(99))[torch.arange(ROWS) % 16]
    image, text = 0.1 * torch.randn(2, ROWS, DIM, generator=generator)
    return normalize(places + image, dim=1), normalize(places + text, dim=1)


def train(communicator: Communicator) -> list[Any]:
    """Some steps on this rank's rows, with a learned temperature."""
    share = ROWS // communicator.world_size
    mine = slice(communicator.rank * share, (communicator.rank + 1) * share)
    results = []
    for m, rule in ((64, "robust"), (512, "robust"), (512, "learned")):
        temperature = {"initial": 0.01, "rule": rule, "rho": 6.5, "lr": 1e-3}
        options = {"temperature": temperature, "queue": {"size": m}}
        method = objective("neuclip_queue", communicator, DIM, torch.float32, **options)
        for number in range(STEPS):
            image, text = clustered(number)
            results.append(method(batch(image[mine], text[mine], torch.arange(ROWS)[mine]), step(number)))
    return [(found.image, found.text, found.loss) for found in results]


def test_float32_at_a_low_temperature() -> None:
    one, ranks = train(Communicator()), run_ranks(2, train)
    for number, wanted in enumerate(one):
        for part in (0, 1):
            whole = torch.cat([rank[number][part] for rank in ranks])
            assert relative_error(whole, wanted[part]) < 1e-4, number
        torch.testing.assert_close(ranks[0][number][2], wanted[2], rtol=1e-4, atol=0)
