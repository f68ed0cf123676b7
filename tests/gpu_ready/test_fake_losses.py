"""Run all methods' steps and the evaluation on a simulated GPU: no mixed devices, and no waits except for results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarking.run_loss import build_loss
from build import SAMPLES, VARIANTS
from evaluation_sets import labeled_set, tokenize, transform
from fake_cuda import DEVICE, RANKS, GpuRank, fake_cuda

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.evaluation.encoding import BatchEncoder, encoder_of
from neuclip_ds.evaluation.retrieval import retrieval
from neuclip_ds.evaluation.sets import open_labeled
from neuclip_ds.evaluation.tasks import GroupRule
from neuclip_ds.evaluation.zero_shot import classify
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.stored_features import StoredRows, Teachers

ROWS = 12
DIM = 6
# the first step, in which NeuCLIP draws its prototypes and AmorLIP its nets; later steps only fit them
WARM_UP = {"neuclip": 1, "amorlip": 1}
ALL_VALID = torch.ones(ROWS, dtype=torch.bool)
ONE_INVALID = torch.arange(ROWS) != 2
ONE_OF_EACH_KIND = ("openclip", "siglip", "fastclip_v3", "isogclr", "amorlip", "neuclip", "neuclip_queue")
CASES = [
    *((name, 8) for name in VARIANTS),
    *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ONE_OF_EACH_KIND),
]


def loss_of(name: str, rank: GpuRank) -> ContrastiveLoss:
    method, options = VARIANTS[name]
    config = Config.model_validate({"objective": {"method": method, **options}})
    return build_loss(config, DIM, SAMPLES, rank, torch.bfloat16)


def run_step(
    loss: ContrastiveLoss,
    number: int,
    valid: torch.Tensor = ALL_VALID,
    reference: StoredRows | None = None,
    teacher: Teachers | None = None,
) -> None:
    """Run a step as the trainer does, with float32 features, texts first, and stored features in host memory."""
    at = Position(step=number, lr=1e-3, peak_lr=1e-3)
    pending = loss.begin(torch.arange(ROWS), valid, at, reference=reference, teacher=teacher)
    image = torch.empty(ROWS, DIM, device=DEVICE, requires_grad=True)
    text = torch.empty(ROWS, DIM, device=DEVICE, requires_grad=True)
    pending.add_text(text)
    pending.add_image(image)
    pending.begin_reads()
    value = loss(image, text, pending=pending)
    value.backward()
    assert image.grad is not None
    assert text.grad is not None
    assert image.grad.shape == text.grad.shape == image.shape
    for tensor in (image.grad, text.grad, value, loss.feature_gradient_norm, *loss.metric_tensors.values()):
        assert tensor.device == DEVICE


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_the_host_does_not_wait_in_a_step_of_any_loss(name: str, world_size: int) -> None:
    """Neither an invalid row nor undoing a step adds a wait; one method of each kind also takes a step after that."""
    with fake_cuda() as gpu:
        loss = loss_of(name, GpuRank(world_size))
        warm_up = WARM_UP.get(VARIANTS[name][0], 0)
        for number in range(warm_up):
            run_step(loss, number)
        gpu.syncs.clear()
        run_step(loss, warm_up, ONE_INVALID)
        loss.undo()
        if name in ONE_OF_EACH_KIND:
            run_step(loss, warm_up + 1)
    assert not gpu.syncs


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_the_host_does_not_wait_for_stored_features(name: str, world_size: int) -> None:
    rows = (torch.zeros(ROWS, 2 * DIM), torch.zeros(ROWS, 2 * DIM))
    with fake_cuda() as gpu:
        loss = loss_of(name, GpuRank(world_size))
        reference = rows if "reference" in loss.function.uses_stored else None
        for number in range(WARM_UP.get(VARIANTS[name][0], 0)):
            run_step(loss, number, reference=reference, teacher=[rows, rows])
        gpu.syncs.clear()
        run_step(loss, 1, reference=reference, teacher=[rows, rows])
        loss.undo()
        run_step(loss, 2, ONE_INVALID, reference=reference, teacher=[rows, rows])
    assert not gpu.syncs


@pytest.mark.parametrize(("name", "validate"), [("openclip", False), ("fastclip_v3", False), ("fastclip_v3", True)])
def test_the_loss_of_other_training_loops_waits_only_to_validate(name: str, validate: bool) -> None:
    with fake_cuda() as gpu:
        options = VARIANTS[name][1]
        schedule = {"dim": DIM, "samples": SAMPLES, "epochs": 3, "steps_per_epoch": 100}
        loss_fn = ContrastiveLoss(name, **schedule, device=DEVICE, validate=validate, **options)
        for _ in range(2):
            gpu.syncs.clear()
            image = torch.empty(ROWS, DIM, device=DEVICE, requires_grad=True)
            text = torch.empty(ROWS, DIM, device=DEVICE, requires_grad=True)
            loss_fn(image, text, torch.arange(ROWS)).backward()
        assert image.grad is not None
        assert image.grad.device == DEVICE
    assert gpu.syncs == ({"losses/checks.py": 1} if validate else {})


@pytest.mark.parametrize("world_size", RANKS)
def test_a_gather_of_host_tensors_over_nccl_alone_waits_only_for_its_own_stream(world_size: int) -> None:
    """With NCCL alone, the copy to the host does not wait for towers that are launched after the gather."""
    index = torch.arange(ROWS)
    with fake_cuda() as gpu:
        pending = GpuRank(world_size, only_nccl=True).begin_host_gather(index, "features")
        assert not gpu.awaited
        assert gpu.current_stream is gpu.default_stream
        torch.zeros(1, device=DEVICE)  # the towers' work, on the current stream
        gathered = pending.wait()
    assert not gpu.syncs
    assert gathered.device.type == "cpu"
    assert gathered.shape == (world_size * ROWS,)
    if world_size == 1:
        assert gathered is index
        return
    (side_stream,) = gpu.host_copies
    assert side_stream is not gpu.default_stream
    assert gpu.awaited == [side_stream]
    assert not side_stream.waits_for


BATCHES = 3
IMAGES_PER_BATCH = 2
CLASSES = 3


class Pixels(torch.nn.Module):
    """Towers whose features are the first row of pixels and the tokens."""

    def forward(
        self, image: torch.Tensor | None, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return None if image is None else image[:, 0, 0].float(), None if tokens is None else tokens.float()


@pytest.mark.parametrize("world_size", RANKS)
def test_retrieval_waits_once_for_its_ranks(world_size: int) -> None:
    image = torch.zeros(ROWS, 3, 2, DIM, dtype=torch.uint8)
    tokens, valid = torch.zeros(ROWS, DIM, dtype=torch.int64), torch.arange(ROWS) > 0
    batches = [Batch(image, tokens, torch.arange(ROWS), valid) for _ in range(BATCHES)]
    with fake_cuda() as gpu:
        size = ROWS * BATCHES * world_size
        metrics = retrieval(encoder_of(Pixels(), DEVICE), batches, GpuRank(world_size), chunk=size)
    assert gpu.syncs == {"evaluation/retrieval.py": 1}
    assert len(metrics) == 7


@pytest.mark.parametrize("world_size", RANKS)
def test_classification_waits_once_for_its_counts(world_size: int, tmp_path: Path) -> None:
    """Classify two batches on each rank, with two rules that assign the samples to groups."""
    labeled_set(tmp_path, 2 * IMAGES_PER_BATCH * world_size, CLASSES)
    image_set = open_labeled(tmp_path)
    rules = [GroupRule(field="group", column=column, worst="worst") for column in (0, 1)]
    with fake_cuda(integer=IMAGES_PER_BATCH) as gpu:
        encoder = BatchEncoder(encoder_of(Pixels(), DEVICE), tokenize, GpuRank(world_size), IMAGES_PER_BATCH, transform)
        counts, groups = classify(encoder, image_set, rules)
    assert gpu.syncs == {"evaluation/zero_shot.py": 1}
    assert counts.support.shape == (CLASSES,) and len(groups) == 2
