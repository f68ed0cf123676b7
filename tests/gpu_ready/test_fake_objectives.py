"""Run all methods' steps and the evaluation on a simulated GPU: no mixed devices, and no waits except for results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from build import SAMPLES, VARIANTS
from evaluation_sets import labeled_set, tokenize, transform
from fake_cuda import DEVICE, RANKS, GpuRank, fake_cuda
from neuclip_ds.objectives import build_objective

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.evaluation.retrieval import retrieval
from neuclip_ds.evaluation.sets import open_labeled
from neuclip_ds.evaluation.tasks import GroupRule
from neuclip_ds.evaluation.zero_shot import classify
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.losses.base import Context, Objective, Step
from neuclip_ds.losses.gather import Features

ROWS, DIM = 12, 6
WARM_UP = 2  # steps in which NeuCLIP draws its prototypes and AmorLIP its nets; the next step only fits them
WHOLE = torch.ones(ROWS, dtype=torch.bool)


def objective_of(name: str, rank: GpuRank) -> Objective:
    method, options = VARIANTS[name]
    config = Config.model_validate({"objective": {"method": method, **options}})
    return build_objective(config, Context(DIM, SAMPLES, rank), torch.bfloat16)


def run_step(objective: Objective, number: int, valid: torch.Tensor = WHOLE) -> Callable[[], None]:
    """Run a step as the trainer does, with float32 features, texts first; return a function that undoes the step."""
    index = torch.arange(ROWS)
    image, text = torch.empty(2, ROWS, DIM, device=DEVICE)
    restore = objective.restore_point()
    gather = objective.begin_gather(index, valid)
    assert gather is not None
    gather.add_text(text)
    gather.add_image(image)
    found = objective(Features(image, text, index, valid, gather), Step(number, 0, 1e-3, 1e-3))
    assert found.image.shape == found.text.shape == image.shape
    assert all(x.device == DEVICE for x in (found.image, found.text, found.loss, *found.metrics.values()))
    return restore


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step(name: str, world_size: int) -> None:
    with fake_cuda() as gpu:
        objective = objective_of(name, GpuRank(world_size))
        for number in range(WARM_UP):
            run_step(objective, number)
        gpu.syncs.clear()
        run_step(objective, WARM_UP)()
        run_step(objective, WARM_UP, WHOLE & (torch.arange(ROWS) != 2))
    assert not gpu.syncs, "the host waits, or a row that does not count adds a wait"


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("name", ["openclip", "fastclip_v3"])
def test_the_loss_of_other_training_loops(name: str, validate: bool) -> None:
    with fake_cuda() as gpu:
        options = VARIANTS[name][1]
        schedule = {"dim": DIM, "samples": SAMPLES, "epochs": 3, "steps_per_epoch": 100}
        loss_fn = ContrastiveLoss(name, **schedule, device=DEVICE, validate=validate, **options)
        for _ in range(2):
            gpu.syncs.clear()
            image, text = (torch.empty(ROWS, DIM, device=DEVICE, requires_grad=True) for _ in range(2))
            loss_fn(image, text, torch.arange(ROWS)).backward()
        assert image.grad is not None and image.grad.device == DEVICE
    assert gpu.syncs == ({"loss/checks.py": 1} if validate else {})


BATCHES, SIZE, CLASSES = 3, 2, 3


class Pixels(torch.nn.Module):
    """Towers whose features are the first row of pixels and the tokens."""

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
    """Classify two batches on each rank, with two rules that assign the samples to groups."""
    labeled_set(tmp_path, 2 * SIZE * world_size, CLASSES)
    image_set = open_labeled(tmp_path)
    rules = [GroupRule(field="group", column=column, worst="worst") for column in (0, 1)]
    with fake_cuda(integer=SIZE) as gpu:
        encoder = BatchEncoder(encoder_of(Pixels(), DEVICE), tokenize, GpuRank(world_size), SIZE, transform)
        counts, groups = classify(encoder, image_set, rules)
    assert gpu.syncs == {"evaluation/zero_shot.py": 1}
    assert counts.support.shape == (CLASSES,) and len(groups) == 2
