"""Retrieval and zero-shot classification: one read from the device at the end, however many batches there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from evaluation_sets import labeled_set, tokenize, transform
from fake_cuda import DEVICE, RANKS, GpuRank, fake_cuda

from neuclip_ds.data.dataset import Batch
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.evaluation.retrieval import retrieval
from neuclip_ds.evaluation.sets import open_labeled
from neuclip_ds.evaluation.tasks import GroupRule
from neuclip_ds.evaluation.zero_shot import classify

ROWS, DIM, BATCHES = 8, 6, 3
SIZE, CLASSES = 2, 3


class Pixels(torch.nn.Module):
    """Towers whose features are the first pixels and the tokens."""

    def forward(
        self, image: torch.Tensor | None, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return None if image is None else image[:, 0, 0].float(), None if tokens is None else tokens.float()


@pytest.mark.parametrize("world_size", RANKS)
def test_retrieval(world_size: int) -> None:
    image = torch.zeros(ROWS, 3, 2, DIM, dtype=torch.uint8)
    tokens, valid = torch.zeros(ROWS, DIM, dtype=torch.int64), torch.arange(ROWS) > 0
    batches = [Batch(image, tokens, torch.arange(ROWS), valid) for _ in range(BATCHES)]
    with fake_cuda() as gpu:
        size = ROWS * BATCHES * world_size
        found = retrieval(encoder_of(Pixels(), DEVICE), batches, GpuRank(world_size), chunk=size)
    assert gpu.syncs == {"evaluation/retrieval.py": 1}
    assert len(found) == 7


@pytest.mark.parametrize("world_size", RANKS)
def test_classification(world_size: int, tmp_path: Path) -> None:
    """Two batches of a rank, whose samples have two groups."""
    labeled_set(tmp_path, 2 * SIZE * world_size, CLASSES)
    image_set = open_labeled(tmp_path)
    rules = [GroupRule(field="group", column=column, worst="worst") for column in (0, 1)]
    with fake_cuda(integer=SIZE) as gpu:
        encoder = BatchEncoder(encoder_of(Pixels(), DEVICE), tokenize, GpuRank(world_size), SIZE, transform)
        counts, groups = classify(encoder, image_set, rules)
    assert gpu.syncs == {"evaluation/zero_shot.py": 1}
    assert counts.support.shape == (CLASSES,) and len(groups) == 2
