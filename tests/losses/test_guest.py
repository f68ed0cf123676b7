"""The loss inside other people's programs: copies and pickles, default devices, scalers, static graphs, compilation."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from build import SAMPLES, VARIANTS, accumulated, pairs
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, Subset

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss, IndexedDataset

DIM = 6
ROWS = 12


def loss_of(variant: str = "fastclip_v3", **arguments: Any) -> ContrastiveLoss:
    method, options = VARIANTS[variant]
    sizes = {"dim": DIM, "samples": SAMPLES, "epochs": 2, "steps_per_epoch": 4}
    return ContrastiveLoss(method, **sizes, **options, **arguments)


def step(loss_fn: ContrastiveLoss, number: int) -> tuple[Tensor, Tensor]:
    """Return the loss of a training call and its gradient with respect to the images."""
    image, text = (features.float().requires_grad_() for features in pairs(ROWS, DIM, seed=number))
    loss = loss_fn(image, text, torch.arange(ROWS, device="cpu") + number)
    loss.backward()
    assert image.grad is not None
    return loss.detach(), image.grad


def through_pickle(loss_fn: ContrastiveLoss) -> ContrastiveLoss:
    file = io.BytesIO()
    torch.save(loss_fn, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, ContrastiveLoss)
    return loaded


def averaged(loss_fn: ContrastiveLoss) -> ContrastiveLoss:
    module = nn.ModuleDict({"tower": nn.Linear(2, 2), "loss": loss_fn})
    average = AveragedModel(module)
    average.update_parameters(module)
    return average.module["loss"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, averaged])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_copy_continues_with_equal_steps_and_is_independent(
    variant: str, duplicate: Callable[[ContrastiveLoss], ContrastiveLoss]
) -> None:
    loss_fn = loss_of(variant)
    step(loss_fn, 0)
    duplicated = duplicate(loss_fn)
    twin = copy.deepcopy(loss_fn)
    results = [step(duplicated, number) for number in (1, 2)]
    expected = [step(loss_fn, number) for number in (1, 2)]
    for of_copy, of_original in zip(results, expected, strict=True):
        assert all(map(torch.equal, of_copy, of_original))
    assert all(map(torch.equal, step(twin, 1), expected[0]))  # the steps of others have not changed it


def _copies_on_a_rank(communicator: Communicator) -> list[bool]:
    loss_fn = loss_of(group=communicator.group)
    step(loss_fn, 0)
    copies = [copy.deepcopy(loss_fn), pickle.loads(pickle.dumps(loss_fn))]
    expected = step(loss_fn, 1)
    return [all(map(torch.equal, step(duplicated, 1), expected)) for duplicated in copies]


def test_copies_on_two_ranks_share_the_process_group() -> None:
    assert run_ranks(2, _copies_on_a_rank) == [[True, True]] * 2


def _pickled_on_a_rank(communicator: Communicator) -> bytes:
    return pickle.dumps(loss_of())


def test_a_loss_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="rank 1 of 2"):
        pickle.loads(run_ranks(2, _pickled_on_a_rank)[1])


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    """Create tensors without an explicit device on the meta device, where operations with host tensors fail."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("meta_by_default")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_default_device_has_no_effect(variant: str) -> None:
    torch.set_default_device("cpu")
    image, text = (features.float() for features in pairs(ROWS, DIM))
    index = torch.arange(ROWS)
    torch.set_default_device("meta")
    loss_fn = loss_of(variant)
    halves = [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)]
    with loss_fn.accumulate() as passes:
        for rows in halves:
            with passes.features():
                passes.add(image[rows], text[rows], index[rows])
        passes.loss()
        for rows in halves:
            with passes.gradients():
                passes.backward(image[rows].clone().requires_grad_(), text[rows].clone().requires_grad_())
    pending = loss_fn.begin(index)
    pending.add_text(text)
    pending.add_image(image)
    pending.begin_reads()
    loss_fn(image.requires_grad_(), text, pending=pending).backward()
    loss_fn.load_state_dict(loss_fn.state_dict())
    assert loss_fn.eval()(image, text).device.type == "cpu"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_default_dtype_has_no_effect(variant: str) -> None:
    expected = step(loss_of(variant), 0)
    torch.set_default_dtype(torch.float64)
    try:
        results = step(loss_of(variant), 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("given", ["argument", "attribute"])
def test_a_scaler_can_be_used_in_the_first_accumulated_step(given: str) -> None:
    weights: list[Tensor] = []
    for uses_scaler in (False, True):
        torch.manual_seed(0)
        tower = nn.Linear(DIM, DIM)
        optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=uses_scaler)
        loss_fn = loss_of("openclip", scaler=scaler if given == "attribute" else None)
        image, text = (features.float() for features in pairs(ROWS, DIM))
        parts = list(zip(image.split(4), text.split(4), strict=True))
        with loss_fn.accumulate(tower, scale=scaler if given == "argument" else None) as passes:
            for images, texts in parts:
                with passes.features():
                    passes.add(normalize(tower(images), dim=1), texts)
            passes.loss()
            for images, texts in parts:
                with passes.gradients():
                    passes.backward(normalize(tower(images), dim=1), texts)
        scaler.step(optimizer)
        scaler.update()
        weights.append(tower.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


class Towers(nn.Module):
    """Two linear towers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.image = nn.Linear(DIM, DIM)
        self.text = nn.Linear(DIM, DIM)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1)


def _gradients_with_static_graph(communicator: Communicator) -> list[Tensor]:
    """Return the gradients after each of two accumulated steps, with DDP's static graph and without."""
    image, text = (features.float() for features in pairs(ROWS, DIM))
    share = ROWS // communicator.world_size
    local = slice(communicator.rank * share, (communicator.rank + 1) * share)
    parts = list(zip(image[local].split(2), text[local].split(2), strict=True))
    gradients: list[Tensor] = []
    for static_graph in (False, True):
        towers = Towers()
        model = DistributedDataParallel(towers, static_graph=static_graph)
        loss_fn = loss_of("openclip")
        for _ in range(2):
            model.zero_grad()
            for _ in accumulated(loss_fn, model, parts):
                pass
            assert towers.image.weight.grad is not None
            gradients.append(towers.image.weight.grad.clone())
    return gradients


def test_micro_batches_work_with_a_static_graph() -> None:
    for plain_1, plain_2, static_1, static_2 in run_ranks(2, _gradients_with_static_graph):
        torch.testing.assert_close(static_1, plain_1)
        torch.testing.assert_close(static_2, plain_2)


def test_a_compiled_step_compiles_the_towers_and_not_the_loss() -> None:
    from torch._dynamo.testing import CompileCounter

    results: list[Tensor] = []
    counter = CompileCounter()
    for is_compiled in (False, True):
        towers = Towers()
        loss_fn = loss_of()

        def forward(image: Tensor, text: Tensor, index: Tensor, towers=towers, loss_fn=loss_fn) -> Tensor:
            return loss_fn(*towers(image, text), index)

        run = torch.compile(forward, backend=counter) if is_compiled else forward
        image, text = (features.float() for features in pairs(ROWS, DIM))
        for number in range(2):
            loss = run(image, text, torch.arange(ROWS) + number)
            loss.backward()
        assert towers.image.weight.grad is not None
        results.append(towers.image.weight.grad)
    assert torch.equal(results[0], results[1])
    assert counter.frame_count == 1


class Classes(list):
    """A dataset with an attribute of its own, and with the batched access of the `datasets` library."""

    classes = ("cat", "dog")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_an_indexed_dataset_has_the_attributes_of_the_dataset() -> None:
    dataset = IndexedDataset(Classes([torch.zeros(3), torch.ones(3)]))
    assert dataset.classes == ("cat", "dog")
    with pytest.raises(AttributeError, match="missing"):
        dataset.missing  # noqa: B018
    for copied in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        sample, index = copied[1]
        assert torch.equal(sample, torch.ones(3)) and index == 1
    samples, indices = next(iter(DataLoader(Subset(dataset, [1, 0]), batch_size=2)))
    assert samples.tolist() == [[1.0] * 3, [0.0] * 3] and indices.tolist() == [1, 0]


@pytest.mark.parametrize("sample", ["a caption", 3, torch.ones(2)])
def test_a_sample_that_is_no_sequence_becomes_a_pair(sample: Any) -> None:
    assert IndexedDataset([sample])[0] == (sample, 0)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), iter([1, 2]), (number for number in range(2))])
def test_an_iterable_dataset_is_refused(dataset: Any) -> None:
    with pytest.raises(TypeError, match="add_index"):
        IndexedDataset(dataset)
