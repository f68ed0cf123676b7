"""Retrieval of held-out pairs: one read from the device at its end, however many batches there are."""

from __future__ import annotations

import costs
import pytest
import torch
from fake_cuda import DEVICE, fake_cuda
from simulated_rank import RANKS, GpuRank

from neuclip_ds.data.dataset import Batch
from neuclip_ds.evaluation.encoding import encoder_of
from neuclip_ds.evaluation.retrieval import encode_pairs, retrieval

ROWS, DIM, BATCHES = 8, 6, 3


class Towers(torch.nn.Module):
    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return image.float().mean(dim=(2, 3)), tokens.float()


def batches() -> list[Batch]:
    image = torch.zeros(ROWS, DIM, 2, 2, dtype=torch.uint8)
    tokens, valid = torch.zeros(ROWS, DIM, dtype=torch.int64), torch.arange(ROWS) > 0
    return [Batch(image, tokens, torch.arange(ROWS), valid) for _ in range(BATCHES)]


@pytest.mark.parametrize("world_size", RANKS)
def test_retrieval(world_size: int) -> None:
    with fake_cuda() as gpu:
        encode = encoder_of(Towers(), DEVICE)
        found = retrieval(encode_pairs(encode, batches()), GpuRank(world_size), chunk=ROWS * BATCHES * world_size)
        costs.check("retrieval", f"{BATCHES} batches", world_size, gpu)
    assert len(found) == 7
