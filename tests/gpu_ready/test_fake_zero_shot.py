"""Zero-shot classification: batches and prompts wait for nothing; the counts are read at the end."""

from __future__ import annotations

from pathlib import Path

import costs
import pytest
import torch
from evaluation_sets import labelled_set, tokenize, transform
from fake_cuda import DEVICE, fake_cuda
from simulated_rank import RANKS, GpuRank

from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.evaluation.tasks import GroupRule
from neuclip_ds.evaluation.zero_shot import ZeroShotSet, classify

SIZE, CLASSES = 2, 3


class Towers(torch.nn.Module):
    def forward(
        self, image: torch.Tensor | None, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return None if image is None else image[:, 0, 0].float(), None if tokens is None else tokens.float()


@pytest.mark.parametrize("world_size", RANKS)
def test_classification(world_size: int, tmp_path: Path) -> None:
    """Two batches of a rank, whose samples have two groups."""
    labelled_set(tmp_path, 2 * SIZE * world_size, CLASSES)
    image_set = ZeroShotSet.read(tmp_path)
    rules = [GroupRule(field="group", column=column, worst="worst") for column in (0, 1)]
    with fake_cuda(integer=SIZE) as gpu:
        encoder = BatchEncoder(encoder_of(Towers(), DEVICE), tokenize, GpuRank(world_size), SIZE)
        counts, groups = classify(encoder, image_set, transform, rules)
        costs.check("zero-shot", "two batches", world_size, gpu)
    assert counts.support.shape == (CLASSES,) and len(groups) == 2
