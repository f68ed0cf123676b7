"""The loss gives the objective's gradient, whatever the loop does: ranks, dtypes, evaluation, misuse, state."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from build import SAMPLES, VARIANTS, batch, objective, pairs, step
from ranks import run_ranks
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.loss import ContrastiveLoss
from neuclip_ds.objectives import METHODS

DIM, ROWS = 6, 12
every_method = pytest.mark.parametrize("name", METHODS)


def options(name: str) -> dict[str, Any]:
    return {"temperature": {"initial": 0.07, "lr": 1e-2}, **VARIANTS[name][1]}


def loss_of(name: str, **changes: Any) -> ContrastiveLoss:
    arguments = {"dim": DIM, "samples": SAMPLES, "epochs": 3, "steps_per_epoch": 2, "lr": 1e-3, "adam_eps": 1e-8}
    return ContrastiveLoss(name, **{**arguments, **options(name), **changes})


def features(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 leaves and an index."""
    image, text = pairs(rows, DIM, seed)
    return image.requires_grad_(), text.requires_grad_(), torch.arange(rows) + seed


@every_method
def test_losses_and_gradients_are_the_objectives_step_after_step(name: str) -> None:
    loss_fn = loss_of(name)
    wanted = objective(name, Communicator(), DIM, **options(name))
    for number in range(5):
        image, text, index = features(number)
        loss = loss_fn(image, text, index)
        (3 * loss).backward()
        place = step(number, number // 2)._replace(progress=number / 6)
        expected = wanted(batch(image.detach(), text.detach(), index), place)
        assert torch.equal(loss, expected.loss)
        assert torch.equal(image.grad, 3 * expected.image)
        assert torch.equal(text.grad, 3 * expected.text)
    assert loss_fn.metrics == {key: float(value) for key, value in expected.metrics.items()}


def _on_ranks(communicator: Communicator, name: str, sizes: list[int], reduction: str) -> tuple[Tensor, ...]:
    """A rank's part of some steps with unequal rows; the last step's gradients, as they are summed over ranks."""
    loss_fn = loss_of(name, reduction=reduction)
    start = sum(sizes[: communicator.rank])
    mine = slice(start, start + sizes[communicator.rank])
    for number in range(4):
        image, text, index = (x.detach()[mine] for x in features(number, sum(sizes)))
        image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
        loss = loss_fn(image, text, index)
        loss.backward()
    assert image.grad is not None and text.grad is not None
    return loss.detach(), image.grad, text.grad


@every_method
def test_ranks_with_unequal_rows_equal_one_rank(name: str) -> None:
    one = _on_ranks(Communicator(), name, [9], "sum")
    for reduction, factor in (("sum", 1), ("ddp_mean", 2)):
        found = run_ranks(2, _on_ranks, name, [6, 3], reduction)
        assert torch.allclose(found[0][0], one[0], rtol=1e-10)
        for place in (1, 2):
            together = torch.cat([found[0][place], found[1][place]]) / factor
            assert torch.allclose(together, one[place], rtol=1e-8, atol=1e-12)


@every_method
def test_evaluation_reports_and_learns_nothing(name: str) -> None:
    loss_fn = loss_of(name)
    for number in range(3):
        loss_fn(*features(number)).backward()
    before = copy.deepcopy(loss_fn.state_dict())
    image, text, index = features(7)
    with torch.no_grad():
        without_gradient = loss_fn(image, text, index)
    loss_fn.eval()
    reported = loss_fn(image, text, index)
    reported.backward()
    unknown = loss_fn(image, text)  # samples that are not in the training set
    assert torch.equal(reported, without_gradient)
    assert torch.isfinite(torch.stack([reported.detach(), unknown.detach()])).all()
    after, before = (state["_extra_state"] for state in (loss_fn.state_dict(), before))
    assert after["calls"] == before["calls"] == 3
    torch.testing.assert_close(after["replicated"], before["replicated"], rtol=0, atol=0)
    torch.testing.assert_close(after["tables"], before["tables"], rtol=0, atol=0, equal_nan=True)


@every_method
def test_a_loss_that_evaluates_first_can_be_trained(name: str) -> None:
    loss_fn, wanted = loss_of(name), loss_of(name)
    with torch.inference_mode():
        loss_fn(*(x.detach().clone() for x in features(7)))  # float64: the state is built once more
    for number in range(2):
        assert torch.equal(loss_fn(*features(number)), wanted(*features(number)))


@pytest.mark.gpu
def test_index_and_mask_may_be_on_the_host(device: str) -> None:
    image, text, index = (x.detach() for x in features(0))
    valid = torch.ones(ROWS, dtype=torch.bool)
    found = loss_of("fastclip_v3")(image.to(device), text.to(device), index, valid)
    assert torch.allclose(found.cpu(), loss_of("fastclip_v3")(image, text, index, valid))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_autocast_and_half_precision_change_nothing_but_rounding(dtype: torch.dtype) -> None:
    image, text, index = features(0, 32)
    image, text = (x.detach().to(dtype).requires_grad_() for x in (image, text))
    plain, in_autocast = loss_of("openclip"), loss_of("openclip")
    wanted = plain(image.detach().float(), text.detach().float(), index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = in_autocast(image, text, index)
        loss.backward()
    assert torch.equal(loss.detach(), wanted)
    assert image.grad is not None and image.grad.dtype == dtype
    assert plain.temperature == in_autocast.temperature


def test_a_repeated_index_keeps_its_last_row() -> None:
    image, text, _ = features(0, 4)
    index = torch.tensor([5, 5, 6, 5])
    loss_fn, distinct = loss_of("fastclip_v1"), loss_of("fastclip_v1")
    assert torch.equal(loss_fn(image, text, index), distinct(image, text, torch.arange(4)))
    u, wanted = (fn.state_dict()["_extra_state"]["tables"]["samples"] for fn in (loss_fn, distinct))
    for key in u:
        assert torch.equal(u[key][5], wanted[key][3])
        assert torch.equal(u[key][6], wanted[key][2])


def test_invalid_rows_do_not_count() -> None:
    image, text, index = features(0, 6)
    valid = torch.tensor([True, True, False, True, False, True])
    holes = torch.where(valid[:, None], image.detach(), torch.nan).requires_grad_()
    loss = loss_of("neuclip")(holes, text, index, valid)
    loss.backward()
    kept = [x.detach()[valid].requires_grad_() for x in (image, text)]
    wanted = loss_of("neuclip")(*kept, index[valid])
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert torch.equal(holes.grad[valid], kept[0].grad)
    assert not holes.grad[~valid].any()


MISUSE: list[tuple[dict[str, Any], str]] = [
    ({"image_features": torch.ones(4, DIM)}, "image_features must have rows of norm 1"),
    ({"text_features": torch.full((4, DIM), torch.nan)}, "text_features must have rows of norm 1"),
    ({"text_features": torch.eye(4)}, r"text_features is torch.float32 \(4, 4\), but must be floating \(4, 6\)"),
    ({"index": torch.tensor([0, 1, 2, SAMPLES])}, rf"index 1000 is outside \[0, {SAMPLES}\)"),
    ({"index": torch.tensor([0, 1, 2, -1])}, "index -1 is outside"),
    ({"index": torch.arange(3)}, r"index is torch.int64 \(3,\), but must be one integer per row"),
    ({"index": torch.arange(4.0)}, "index is torch.float32"),
    ({"index": None}, "index is missing: fastclip_v3 keeps state of each sample"),
    ({"valid": torch.ones(4)}, "must be one bool per row"),
]


@pytest.mark.parametrize(("wrong", "message"), MISUSE, ids=[message for _, message in MISUSE])
def test_misuse_is_one_clear_error(wrong: dict[str, Any], message: str) -> None:
    image = torch.eye(DIM)[:4]
    given = {"image_features": image, "text_features": image.clone(), "index": torch.arange(4), **wrong}
    with pytest.raises(ValueError, match=message):
        loss_of("fastclip_v3")(**given)


def _wrong_on_one(communicator: Communicator) -> str:
    image = torch.eye(DIM)[:4] * (1 + communicator.rank)
    with pytest.raises(ValueError) as caught:
        loss_of("openclip")(image, torch.eye(DIM)[:4], torch.arange(4))
    return str(caught.value)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(2, _wrong_on_one)
    assert "rank 1 was given arguments that cannot be used" in first
    assert "image_features must have rows of norm 1" in second


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("neuclp", {}, "did you mean neuclip"),
        ("openclip", {"npn": {"lr": 1.0}}, "objective.npn.lr is read by neuclip only"),
        ("neuclip", {"npn": {"rate": 1.0}}, "npn.rate: Extra inputs"),
        ("fastclip_v3", {"steps_per_epoch": None}, "pass epochs and steps_per_epoch"),
        ("openclip", {"reduction": "mean"}, "use 'ddp_mean' or 'sum'"),
    ],
)
def test_wrong_options_are_refused(method: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dim": DIM, "samples": 10, "steps_per_epoch": 1, **changes}
    with pytest.raises(UserError, match=message):
        ContrastiveLoss(method, **arguments)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_state_is_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def rows(seed: int) -> list[Tensor]:
        return [x.detach().to(dtype) if x.is_floating_point() else x for x in features(seed)]

    loss_fn, by_folder, by_dict = loss_of(name), loss_of(name), loss_of(name)
    for number in range(3):
        loss_fn(*rows(number))
    loss_fn.save(tmp_path)
    by_folder.load(tmp_path)
    torch.save(loss_fn.state_dict(), tmp_path / "state.pt")
    by_dict.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    wanted = loss_fn(*rows(3))
    for loaded in (by_folder, by_dict):
        assert torch.equal(loaded(*rows(3)), wanted)
        assert loaded.metrics == loss_fn.metrics


def test_the_state_of_another_method_is_refused() -> None:
    with pytest.raises(UserError, match="method=openclip, this loss has method=neuclip"):
        loss_of("neuclip").load_state_dict(loss_of("openclip").state_dict())


@pytest.mark.parametrize("name", ["openclip", "siglip", "neuclip", "amorlip"])
def test_parameters_are_handed_out_with_the_gradients_of_the_loss(name: str) -> None:
    loss_fn = loss_of(name, own_optimizer=False)
    parameters = dict(loss_fn.named_parameters())
    assert parameters
    optimizer = torch.optim.SGD(parameters.values(), lr=1e-3)
    before = {key: p.detach().clone() for key, p in parameters.items()}
    for number in range(3):
        rows = [x.float().detach() if x.is_floating_point() else x for x in features(number)]
        loss_fn(rows[0].requires_grad_(), rows[1], rows[2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {key for key, p in parameters.items() if not torch.equal(p, before[key])}
    assert moved == set(parameters)


def test_the_temperatures_gradient_is_that_of_autograd() -> None:
    loss_fn = loss_of("openclip", own_optimizer=False)
    image, text = (x.detach().float() for x in features(0)[:2])
    loss_fn(image, text).backward()
    theta = next(loss_fn.parameters()).detach().clone().requires_grad_()
    logits = theta.exp() * image @ text.T
    labels = torch.arange(len(image))
    cross = torch.nn.functional.cross_entropy
    ((cross(logits, labels) + cross(logits.T, labels)) / 2).backward()
    assert torch.allclose(next(loss_fn.parameters()).grad, theta.grad, rtol=1e-5)


def test_the_temperature_follows_the_loops_learning_rate() -> None:
    still, moving = loss_of("openclip"), loss_of("openclip")
    still.lr = 0.0
    for loss_fn in (still, moving):
        loss_fn(*features(0))
    assert still.temperature == pytest.approx(0.07)
    assert moving.temperature != pytest.approx(0.07, abs=1e-6)


@pytest.mark.parametrize("name", ["neuclip", "fastclip_v3"])
def test_accumulated_micro_batches_equal_one_batch(name: str) -> None:
    torch.manual_seed(0)
    tower = torch.nn.Sequential(torch.nn.Linear(8, DIM), torch.nn.Dropout(0.2))
    inputs = torch.randn(2, ROWS, 8)

    def encode(rows: slice, seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        image, text = (torch.nn.functional.normalize(tower(x[rows]), dim=1) for x in inputs)
        return image, text

    micro = [slice(low, low + 4) for low in range(0, ROWS, 4)]
    whole, pieces = loss_of(name), loss_of(name)
    image, text = (torch.cat(x) for x in zip(*(encode(rows, i) for i, rows in enumerate(micro)), strict=True))
    loss = whole(image, text, torch.arange(ROWS))
    loss.backward()
    wanted = [p.grad.clone() for p in tower.parameters()]
    tower.zero_grad()
    with pieces.accumulate(tower) as passes:
        for number, rows in enumerate(micro):
            with passes.features():
                passes.add(*encode(rows, number), torch.arange(ROWS)[rows])
        accumulated = passes.loss()
        for number, rows in enumerate(micro):
            with passes.gradients():
                passes.backward(*encode(rows, number))
    assert torch.equal(accumulated, loss.detach())
    for p, gradient in zip(tower.parameters(), wanted, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-5, atol=1e-7)


def test_micro_batches_pass_a_frozen_tower_by() -> None:
    image_tower, text_tower = torch.nn.Linear(8, DIM), torch.nn.Linear(8, DIM).requires_grad_(False)

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        image, text = (torch.nn.functional.normalize(tower(x), dim=1) for tower in (image_tower, text_tower))
        return image, text

    inputs = torch.randn(4, 8)
    loss_of("openclip")(*encode(inputs)).backward()
    wanted = image_tower.weight.grad.clone()
    image_tower.zero_grad()
    with loss_of("openclip").accumulate() as passes:
        for part in inputs.split(2):
            with passes.features():
                passes.add(*encode(part))
        passes.loss()
        for part in inputs.split(2):
            with passes.gradients():
                passes.backward(*encode(part))
    assert torch.allclose(image_tower.weight.grad, wanted, rtol=1e-5, atol=1e-7)
    assert text_tower.weight.grad is None
