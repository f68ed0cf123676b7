"""Check `ContrastiveLoss`: gradients, ranks, dtypes, evaluation, misuse, saved state and micro-batches."""

import copy
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from build import SAMPLES, VARIANTS, pairs
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss, GatheredFeatures, LossContext, LossFunction, LossOutput, Position
from neuclip_ds.losses.base import AdamSettings
from neuclip_ds.losses.methods import METHODS, find_method
from neuclip_ds.state.tensor_file import TensorFile

DIM, ROWS = 6, 12
every_method = pytest.mark.parametrize("name", METHODS)


def options(name: str) -> dict[str, Any]:
    """Return the test options of a method or of one of its variants."""
    return {"temperature": {"initial": 0.07, "lr": 1e-2}, **VARIANTS[name][1]}


def loss_of(name: str, **changes: Any) -> ContrastiveLoss:
    """Build a loss with the test options of a method or of one of its variants."""
    arguments = {"dim": DIM, "samples": SAMPLES, "epochs": 3, "steps_per_epoch": 2, "lr": 1e-3, "adam_eps": 1e-8}
    return ContrastiveLoss(VARIANTS[name][0], **{**arguments, **options(name), **changes})


def features(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 image and text features as leaf tensors, and an index."""
    image, text = pairs(rows, DIM, seed)
    return image.requires_grad_(), text.requires_grad_(), torch.arange(rows) + seed


def state_of(loss_fn: ContrastiveLoss) -> dict[str, Any]:
    state = loss_fn.state_dict()["_extra_state"]
    return copy.deepcopy({key: state[key] for key in ("calls", "replicated", "tables")})


def call_function(function: LossFunction, image: Tensor, text: Tensor, index: Tensor, position: Position) -> LossOutput:
    """Call a method's function on the features of one rank, in training mode."""
    batch = GatheredFeatures(
        padded_image=image.detach(),
        padded_text=text.detach(),
        padded_index=index,
        communicator=Communicator(),
        dtype=torch.float64,
        statistics=function.begin_reads(index),
    )
    return function(batch, position, training=True)


@every_method
def test_counted_and_explicit_positions_give_the_loss_and_gradients_of_the_methods_function(name: str) -> None:
    counting = loss_of(name)
    positioned = loss_of(name)
    context = LossContext(
        dim=DIM,
        samples=SAMPLES,
        communicator=Communicator(),
        dtype=torch.float64,
        adam=AdamSettings(eps=1e-8),
        spare_rows=1,
    )
    function = find_method(name).build(counting.config, context)

    for step in range(5):
        image, text, index = features(step)
        position = Position(step=step, epoch=step // 2, progress=step / 6, lr=1e-3, peak_lr=1e-3)
        with torch.no_grad():
            expected = call_function(function, image, text, index, position)
        loss = counting(image, text, index)
        (3 * loss).backward()
        assert torch.equal(loss, expected.loss)
        assert torch.equal(image.grad, 3 * expected.image_gradient)
        assert torch.equal(text.grad, 3 * expected.text_gradient)
        assert counting.metrics == {key: float(value) for key, value in expected.metrics.items()}
        assert torch.equal(positioned(image, text, index, position=position), loss)
    torch.testing.assert_close(state_of(positioned), state_of(counting), rtol=0, atol=0, equal_nan=True)

    # positions that the counter would not have reached, and another learning rate
    for step in (50, 51):
        image, text, index = features(3)
        position = Position(step=step, epoch=20 + step % 2, progress=0.9, lr=5e-4, peak_lr=2e-3)
        with torch.no_grad():
            expected = call_function(function, image, text, index, position)
        assert torch.equal(positioned(image, text, index, position=position), expected.loss)


def _all_methods(communicator: Communicator, sizes: list[int]) -> dict[tuple[str, str], tuple[Tensor, ...]]:
    """Train every method with both reductions, with `sizes` rows on the ranks."""
    results: dict[tuple[str, str], tuple[Tensor, ...]] = {}
    for name in METHODS:
        for reduction in ("sum", "ddp_mean"):
            results[name, reduction] = _trained(communicator, name, sizes, reduction)
    return results


def _trained(communicator: Communicator, name: str, sizes: list[int], reduction: str) -> tuple[Tensor, ...]:
    """Run four steps on this rank's rows; return the last step's loss and this rank's feature gradients."""
    loss_fn = loss_of(name, reduction=reduction)
    start = sum(sizes[: communicator.rank])
    local = slice(start, start + sizes[communicator.rank])
    for number in range(4):
        image, text, index = (x.detach()[local] for x in features(number, sum(sizes)))
        image = image.clone().requires_grad_()
        text = text.clone().requires_grad_()
        loss = loss_fn(image, text, index)
        loss.backward()
    assert image.grad is not None and text.grad is not None
    return loss.detach(), image.grad, text.grad


def test_ranks_with_unequal_rows_equal_one_rank_for_every_method() -> None:
    one_rank = _all_methods(Communicator(), [9])
    first, second = run_ranks(2, _all_methods, [6, 3])
    for (name, reduction), (loss, image, text) in one_rank.items():
        ranks = 2 if reduction == "ddp_mean" else 1
        first_loss, first_image, first_text = first[name, reduction]
        second_loss, second_image, second_text = second[name, reduction]
        assert torch.equal(first_loss, second_loss), name
        assert torch.allclose(first_loss, loss, rtol=1e-10), name
        image_gradient = torch.cat([first_image, second_image]) / ranks
        text_gradient = torch.cat([first_text, second_text]) / ranks
        assert torch.allclose(image_gradient, image, rtol=1e-8, atol=1e-12), name
        assert torch.allclose(text_gradient, text, rtol=1e-8, atol=1e-12), name


@every_method
def test_evaluation_returns_the_loss_and_changes_no_state(name: str) -> None:
    loss_fn = loss_of(name)
    for number in range(3):
        loss_fn(*features(number)).backward()
    before = state_of(loss_fn)
    image, text, index = features(7)
    with torch.no_grad():
        without_gradient = loss_fn(image, text, index)
    loss_fn.eval()
    reported = loss_fn(image, text, index)
    reported.backward()
    unknown = loss_fn(image, text)  # samples that are not in the training set
    assert torch.equal(reported, without_gradient)
    assert torch.isfinite(torch.stack([reported.detach(), unknown.detach()])).all()
    torch.testing.assert_close(state_of(loss_fn), before, rtol=0, atol=0, equal_nan=True)


@every_method
def test_a_loss_that_evaluates_first_can_be_trained(name: str) -> None:
    loss_fn = loss_of(name)
    trained_only = loss_of(name)
    with torch.inference_mode():
        loss_fn(*(x.detach().clone() for x in features(7)))  # the state is rebuilt for float64
    for number in range(2):
        assert torch.equal(loss_fn(*features(number)), trained_only(*features(number)))


@pytest.mark.gpu
def test_index_and_mask_may_be_on_the_host(device: str) -> None:
    image, text, index = (x.detach() for x in features(0))
    valid = torch.ones(ROWS, dtype=torch.bool)
    loss = loss_of("fastclip_v3")(image.to(device), text.to(device), index, valid)
    assert torch.allclose(loss.cpu(), loss_of("fastclip_v3")(image, text, index, valid))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_autocast_and_half_precision_change_nothing_but_rounding(dtype: torch.dtype) -> None:
    image, text, index = features(0, 32)
    image, text = (x.detach().to(dtype).requires_grad_() for x in (image, text))
    plain = loss_of("openclip")
    in_autocast = loss_of("openclip")
    expected = plain(image.detach().float(), text.detach().float(), index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = in_autocast(image, text, index)
        loss.backward()
    assert torch.equal(loss.detach(), expected)
    assert image.grad is not None and image.grad.dtype == dtype
    assert plain.temperature == in_autocast.temperature


def test_autocast_does_not_change_estimates_of_normalizers() -> None:
    image, text, index = features(0, 32)
    batch = image.detach().float(), text.detach().float(), index
    loss_fn = loss_of("fastclip_v3")
    loss_fn(*batch)
    expected = loss_fn.log_normalizers(*batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss_fn.log_normalizers(*batch), expected)


def test_a_repeated_index_keeps_its_last_row() -> None:
    image, text, _ = features(0, 4)
    index = torch.tensor([5, 5, 6, 5])
    loss_fn = loss_of("fastclip_v1")
    distinct = loss_of("fastclip_v1")
    assert torch.equal(loss_fn(image, text, index), distinct(image, text, torch.arange(4)))
    distinct_rows = state_of(distinct)["tables"]["samples"]
    for key, rows in state_of(loss_fn)["tables"]["samples"].items():
        assert torch.equal(rows[5], distinct_rows[key][3])
        assert torch.equal(rows[6], distinct_rows[key][2])


def test_invalid_rows_have_no_effect_and_no_gradient() -> None:
    image, text, index = features(0, 6)
    valid = torch.tensor([True, True, False, True, False, True])
    holes = torch.where(valid[:, None], image.detach(), torch.nan).requires_grad_()
    loss = loss_of("neuclip")(holes, text, index, valid)
    loss.backward()
    kept = [x.detach()[valid].requires_grad_() for x in (image, text)]
    expected = loss_of("neuclip")(*kept, index[valid])
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(holes.grad[valid], kept[0].grad)
    assert not holes.grad[~valid].any()


MISUSE: list[tuple[dict[str, Any], str]] = [
    ({"image_features": torch.ones(4, DIM)}, "image_features must have rows of norm 1"),
    ({"text_features": torch.full((4, DIM), torch.nan)}, "text_features contains NaN or infinite values"),
    (
        {"text_features": torch.eye(4)},
        r"text_features has dtype torch.float32 and shape \(4, 4\), but must be a .* of shape \(4, 6\)",
    ),
    ({"image_features": torch.eye(DIM)[:4].numpy()}, "image_features has type ndarray, but must be a tensor"),
    ({"image_features": torch.tensor(1.0)}, r"image_features has dtype torch.float32 and shape \(\), but must be"),
    ({"text_features": None}, "text_features has type NoneType, but must be a tensor"),
    ({"index": torch.tensor([0, 1, 2, SAMPLES])}, rf"index 1000 is outside \[0, {SAMPLES}\)"),
    ({"index": torch.tensor([0, 1, 2, -1])}, "index -1 is outside"),
    ({"index": torch.arange(3)}, r"index has dtype torch.int64 and shape \(3,\), but must be"),
    ({"index": torch.arange(4.0)}, "index has dtype torch.float32"),
    ({"index": torch.tensor([0, 1, 2, 2000], dtype=torch.uint16)}, "index 2000 is outside"),
    ({"teacher": [torch.eye(4)]}, "teacher has 1 elements, but must be two"),
    ({"reference": torch.eye(4)}, "reference has type Tensor, but must be two"),
    ({"index": [0, 1, 2, 3]}, r"index has type list, but must be a tensor: pass torch.as_tensor\(index\)"),
    ({"index": torch.arange(4).numpy()}, "index has type ndarray, but must be a tensor"),
    ({"index": None}, "fastclip_v3 needs the index of each sample: pass index"),
    ({"valid": torch.ones(4)}, "valid has dtype torch.float32"),
]


@pytest.mark.parametrize(("wrong", "message"), MISUSE, ids=[message for _, message in MISUSE])
def test_an_invalid_argument_raises_an_error_that_names_it(wrong: dict[str, Any], message: str) -> None:
    image = torch.eye(DIM)[:4]
    given = {"image_features": image, "text_features": image.clone(), "index": torch.arange(4), **wrong}
    with pytest.raises(ValueError, match=message):
        loss_of("fastclip_v3")(**given)


def _wrong_on_one(communicator: Communicator) -> dict[str, str]:
    messages: dict[str, str] = {}
    for wrong in ("norm", "type", "mode", "dtype", "text dtype", "teacher dtype", "teachers", "no teacher"):
        distill: dict[str, Any] = {"temperature": [0.1, 0.2]} if wrong == "teachers" else {}
        if wrong == "no teacher":
            distill = {"features": "features/teacher"}
        loss_fn = loss_of("openclip", distill=distill)
        image: Any = torch.eye(DIM)[:4].requires_grad_()
        text = torch.eye(DIM)[:4]
        teachers = [(torch.eye(DIM)[:4], torch.eye(DIM)[:4])] * len(distill.get("temperature", "1"))
        if communicator.rank == 1:
            if wrong == "norm":
                image = image * 2
            elif wrong == "type":
                image = image.detach().numpy()
            elif wrong == "dtype":
                image = image.bfloat16()
            elif wrong == "text dtype":
                text = text.bfloat16()
            elif wrong == "teacher dtype":
                teachers = [(teachers[0][0], teachers[0][1].half())]
            loss_fn.train(wrong != "mode")
        if communicator.rank == 1 and distill:
            teachers = teachers[1:]
        has_teacher = "teacher" in wrong
        with pytest.raises(ValueError) as caught:
            loss_fn(image, text, torch.arange(4), teacher=teachers if has_teacher else None)
        messages[wrong] = str(caught.value)
    return messages


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(2, _wrong_on_one)
    assert "rank 1 was given arguments that cannot be used" in first["norm"]
    assert "image_features must have rows of norm 1" in second["norm"]
    assert "rank 1 was given arguments that cannot be used" in first["type"]
    assert "image_features has type ndarray, but must be a tensor" in second["type"]
    assert "rank 1 was given arguments that cannot be used" in first["teachers"]
    assert "lists 2 values for 1 teacher" in second["teachers"]
    assert "rank 1 was given arguments that cannot be used" in first["no teacher"]
    assert "a batch lacks the stored features" in second["no teacher"]
    for messages in (first, second):
        assert "rank 0 trains while rank 1 evaluates" in messages["mode"]
        assert "image features differ between ranks: torch.float32, torch.bfloat16" in messages["dtype"]
        assert "text features differ between ranks: torch.float32, torch.bfloat16" in messages["text dtype"]
        assert "differ in number, width or dtype between ranks" in messages["teacher dtype"]


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("neuclp", {}, "did you mean neuclip"),
        ("openclip", {"npn": {"lr": 1.0}}, "does not use objective.npn.lr; these methods do: neuclip"),
        ("neuclip", {"npn": {"rate": 1.0}}, "unknown option npn.rate"),
        ("fastclip_v3", {"steps_per_epoch": None}, "pass epochs and steps_per_epoch"),
        ("openclip", {"reduction": "mean"}, "use 'ddp_mean' or 'sum'"),
        ("amorlip", {"steps_per_epoch": None, "epoch_steps": 5, "temperature": {"rho": [1.0, 2.0]}}, "pass epochs"),
        ("openclip", {"queue": {"size": 2}}, "does not use objective.queue.size; these methods do: neuclip_queue"),
        ("fastclip_v3", {"steps_per_epoch": 0}, "steps_per_epoch=0 must be at least 1"),
        ("fastclip_v3", {"epochs": 0}, "epochs=0 must be above 0"),
        ("fastclip_v3", {"samples": 0}, "pass the size of the training set"),
        ("openclip", {"samples": -1}, "samples=-1 must be at least 0"),
        ("openclip", {"dim": -1}, "dim=-1 must be at least 1"),
        ("openclip", {"lr": -0.1}, "lr=-0.1 must be at least 0"),
        ("openclip", {"dtype": torch.bfloat16}, "dtype=torch.bfloat16 is not supported"),
        ("neuclip", {"temperature": {"minimum": 0.001}}, "temperature.minimum=0.001 is below 0.003"),
    ],
)
def test_options_that_the_loss_cannot_use_are_refused(method: str, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dim": DIM, "samples": 10, "steps_per_epoch": 1, **changes}
    with pytest.raises(UserError, match=message):
        ContrastiveLoss(method, **arguments)


def test_constant_gamma_needs_no_length_of_an_epoch() -> None:
    without_length = ContrastiveLoss("sogclr", dim=DIM, samples=SAMPLES)
    with_length = ContrastiveLoss("sogclr", dim=DIM, samples=SAMPLES, epochs=3, steps_per_epoch=2)
    for step in range(4):  # two epochs of the second loss
        batch = features(step)
        assert without_length(*batch) == with_length(*batch)


def test_individual_temperatures_start_at_the_encoders_temperature() -> None:
    loss_fn = ContrastiveLoss("isogclr", dim=DIM, samples=10, encoder_temperature=0.02, temperature={"initial": None})
    assert loss_fn.temperature == 0.02


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loaded_loss_continues_with_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def rows(seed: int) -> list[Tensor]:
        return [x.detach().to(dtype) if x.is_floating_point() else x for x in features(seed)]

    loss_fn = loss_of(name)
    by_folder = loss_of(name)
    by_dict = loss_of(name)
    for number in range(3):
        loss_fn(*rows(number))
    loss_fn.lr = 5e-4  # the next step's, as loops set it after a step of the scheduler
    loss_fn.save(tmp_path)
    by_folder.load(tmp_path)
    torch.save(loss_fn.state_dict(), tmp_path / "state.pt")
    by_dict.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    expected = loss_fn(*rows(3))
    for loaded in (by_folder, by_dict):
        assert torch.equal(loaded(*rows(3)), expected)
        assert loaded.metrics == loss_fn.metrics


def test_load_refuses_a_folder_whose_last_save_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TensorFile, folder: Path) -> None:
        (folder / self.name).write_bytes(b"half a file")
        raise OSError("no space left on device")

    loss_fn = loss_of("sogclr")
    loss_fn.save(tmp_path)
    monkeypatch.setattr(TensorFile, "write", fail)
    with pytest.raises(UserError, match="no space left"):
        loss_fn.save(tmp_path)
    with pytest.raises(UserError, match="is missing"):
        loss_fn.load(tmp_path)


def _save_to_a_file(communicator: Communicator, file: Path) -> str:
    with pytest.raises(UserError) as caught:
        loss_of("sogclr").save(file)
    return str(caught.value)


def test_save_fails_on_all_ranks_if_the_folder_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for message in run_ranks(2, _save_to_a_file, file):
        assert f"cannot be saved in {file}" in message


@pytest.mark.parametrize("through", ["save", "state_dict"])
def test_a_loaded_loss_continues_in_the_same_epoch_if_epochs_have_another_length(through: str, tmp_path: Path) -> None:
    saved = loss_of("fastclip_v3", steps_per_epoch=4)
    loaded = loss_of("fastclip_v3", steps_per_epoch=2)
    for number in range(7):  # 1.75 epochs
        saved(*features(number))
    if through == "save":
        saved.save(tmp_path)
        loaded.load(tmp_path)
    else:
        loaded.load_state_dict(saved.state_dict())
    assert state_of(loaded)["calls"] == 3


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (loss_of("openclip"), "method=openclip.*method=neuclip"),
        (loss_of("neuclip", eps=0.5), "eps=0.5.*eps=1e-06"),
        (
            loss_of("neuclip", temperature={"initial": 0.07, "lr": 1e-2, "rho": 6.5}),
            "temperature.rho=6.5.*temperature.rho=",
        ),
        (loss_of("neuclip", samples=SAMPLES + 1), "samples=1001.*samples=1000"),
    ],
)
def test_the_state_of_another_loss_is_refused(saved: ContrastiveLoss, message: str) -> None:
    with pytest.raises(UserError, match=message):
        loss_of("neuclip").load_state_dict(saved.state_dict())
    replicas = {"npn": {**options("neuclip")["npn"], "replicas": 2}}
    for name, same in (("openclip", {"chunk_size": 7}), ("neuclip", replicas)):  # options that do not affect results
        loss_of(name, **same).load_state_dict(loss_of(name).state_dict())


def test_the_state_of_another_rank_is_refused_and_leaves_the_loss_as_it_was() -> None:
    saved = loss_of("fastclip_v3")
    saved(*features(0))
    state = saved.state_dict()
    state["_extra_state"]["rank"] = 1
    loss_fn = loss_of("fastclip_v3")
    with pytest.raises(UserError, match="from rank 1 of 1, but this is rank 0 of 1"):
        loss_fn.load_state_dict(state)
    assert state_of(loss_fn)["calls"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_pass_does_not_repeat_the_loss(use_reentrant: bool) -> None:
    loss = checkpoint(loss_of("openclip"), *features(0), use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match="apply checkpointing to the towers"):
        loss.backward()


@every_method
@pytest.mark.parametrize("cause", ["gradient", "features"])
def test_a_step_that_the_scaler_skips_leaves_no_trace(name: str, cause: str) -> None:
    tower = torch.nn.Linear(DIM, DIM).double()
    optimizer = torch.optim.SGD(tower.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss_fn = loss_of(name, scaler=scaler)

    def train(number: int, factor: float = 1.0) -> None:
        image, text, index = features(number)
        rows = torch.nn.functional.normalize(tower(image.detach()), dim=1)
        rows = rows * factor if cause == "features" else rows
        optimizer.zero_grad()
        loss = loss_fn(rows, text, index)
        scaler.scale(loss if cause == "features" else loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    for number in range(2):
        train(number)
    before = state_of(loss_fn)
    weights = [p.detach().clone() for p in tower.parameters()]
    train(1, factor=torch.inf)
    after = state_of(loss_fn)
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(p, weight) for p, weight in zip(tower.parameters(), weights, strict=True))
    assert (before.pop("calls"), after.pop("calls")) == (2, 3), "schedules count skipped steps"
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    train(2)
    assert all(p.isfinite().all() for p in tower.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_evaluation_before_the_scaler_is_updated_does_not_prevent_the_undo(dtype: torch.dtype) -> None:
    """For features in float32, the loss is built again, with the state of the loss in float64."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss_fn = loss_of("fastclip_v3", scaler=scaler)
    image, text, index = features(0)
    loss_fn(image, text, index)
    before = state_of(loss_fn)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], 0.1)
    loss = loss_fn(image, text, index)
    scaler.scale(loss + parameter * torch.inf).backward()
    loss_fn.eval()(image.detach().to(dtype), text.detach().to(dtype))
    loss_fn.train()
    scaler.step(optimizer)
    scaler.update()
    after = state_of(loss_fn)
    assert (before.pop("calls"), after.pop("calls")) == (1, 2)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0, check_dtype=False)


def test_the_temperature_after_a_skipped_step_is_that_before_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss_fn = loss_of("fastclip_v3", scaler=scaler)
    image, text, index = features(0)
    loss_fn(image, text, index)
    before = loss_fn.temperature
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler.scale(loss_fn(image * torch.nan, text, index) + parameter * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert loss_fn.temperature == before


def test_with_a_disabled_scaler_features_must_be_finite() -> None:
    loss_fn = loss_of("fastclip_v3", scaler=torch.amp.GradScaler("cpu", enabled=False))
    image, text, index = features(0)
    loss_fn(image, text, index)
    with pytest.raises(ValueError, match="NaN or infinite"):
        loss_fn(image * torch.nan, text, index)


@pytest.mark.parametrize(
    ("name", "changes"), [("openclip", {}), ("neuclip", {"npn": {"network": "mlp", "alpha_grad": "full"}})]
)
def test_evaluation_in_inference_mode_equals_evaluation_without_gradients(name: str, changes: dict[str, Any]) -> None:
    loss_fn = loss_of(name, **changes)
    loss_fn(*features(0))
    loss_fn.eval()
    expected = loss_fn(*features(1))
    with torch.inference_mode():
        image, text, index = features(1)
        found = loss_fn(image.detach().clone(), text.detach().clone(), index)
    assert torch.equal(found, expected.detach())


def test_an_evaluation_without_index_needs_the_spare_row() -> None:
    loss_fn = loss_of("sogclr", spare_row=False).eval()
    with pytest.raises(ValueError, match="pass index"):
        loss_fn(*features(0)[:2])


def test_micro_batches_without_a_mask_are_valid() -> None:
    """Only the last micro-batch, which is padded, has a mask."""
    image, text, index = features(0)
    valid = torch.ones(len(index), dtype=torch.bool)
    valid[-1] = False
    half = len(index) // 2
    losses = []
    for first_mask in (None, valid[:half]):
        loss_fn = loss_of("fastclip_v3")
        with loss_fn.accumulate() as passes:
            for rows, mask in ((slice(half), first_mask), (slice(half, None), valid[half:])):
                with passes.features():
                    passes.add(image[rows], text[rows], index[rows], mask)
            losses.append(passes.loss())
            for rows in (slice(half), slice(half, None)):
                with passes.gradients():
                    passes.backward(image[rows], text[rows])
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], loss_of("fastclip_v3")(image, text, index).detach())


def test_a_batch_must_have_as_many_rows_as_it_began_with() -> None:
    loss_fn = loss_of("openclip")
    image, text, index = features(0)
    image = image.detach().float()
    text = text.detach().float()
    pending = loss_fn.begin(index)
    pending.add_text(text)
    pending.add_image(image)
    pending.begin_reads()
    with pytest.raises(RuntimeError, match=r"2 images and 2 texts, but begin\(\) was called with"):
        loss_fn(image[:2], text[:2], pending=pending)


def test_a_second_derivative_is_refused() -> None:
    image, text, _ = features(0)
    with pytest.raises(RuntimeError, match="does not support double backward: omit create_graph=True"):
        torch.autograd.grad(loss_of("openclip")(image, text), image, create_graph=True)


def test_features_without_a_gradient_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    loss_fn = loss_of("openclip")
    image, text, _ = features(0)
    for _ in range(2):
        loss_fn(image.detach(), text.detach())
    with torch.no_grad():
        loss_of("openclip")(image, text)
    loss_of("openclip")(image, text.detach())
    (record,) = caplog.records
    assert record.message.startswith("A training call updated the loss's state, but the features require no gradient.")


def test_the_temperature_follows_the_loops_learning_rate() -> None:
    still = loss_of("openclip")
    moving = loss_of("openclip")
    still.lr = 0.0
    for loss_fn in (still, moving):
        loss_fn(*features(0))
    assert still.temperature == pytest.approx(0.07)
    assert moving.temperature != pytest.approx(0.07, abs=1e-6)


@pytest.mark.parametrize(
    "calls",
    [
        "FA FA L",  # F: features, A: add, L: loss, G: gradients, B: backward; digits number the micro-batches
        "FA FA G0B0",
        "FA FA B0",
        "FA FA L G0B0",
        "FA FA L G0B0 G1B1 G1B1",
        "FA FA L G0B0 G1B1 B1",
        "FA FA L G1B1 G0B0",
        "FA FA L G0 G1B1",
        "FA FA L G0B0B1",
        "FA FA L B0B1",
        "FA FA L L G0B0 G1B1",
        "FA F L G0B0 G1B1",
        "FAA F L G0B0 G1B1",
        "L",
        "",
    ],
)
def test_wrong_micro_batches_are_refused(calls: str) -> None:
    image, text = pairs(6, DIM)
    parts = list(zip(image.split(3), text.split(3), strict=True))
    leaves: list[list[Tensor]] = []  # the features in the second pass
    for part in parts:
        leaves.append([rows.clone().requires_grad_() for rows in part])

    def run() -> None:
        with loss_of("openclip").accumulate() as passes:
            added = 0
            for group in calls.split():
                if group == "L":
                    passes.loss()
                contexts = {"F": passes.features, "G": passes.gradients}
                with contexts.get(group[0], nullcontext)():
                    for _ in range(group.count("A")):
                        passes.add(*parts[added])
                        added += 1
                    for number in re.findall(r"B(\d)", group):
                        passes.backward(*leaves[int(number)])

    with pytest.raises(RuntimeError, match=r"accumulate\(\): "):
        run()
    calls = "FA FA L G0B0 G1B1"
    run()


def test_micro_batches_draw_the_same_dropout_twice_and_pass_a_frozen_tower_by() -> None:
    image_tower = torch.nn.Sequential(torch.nn.Linear(8, DIM), torch.nn.Dropout(0.2))
    text_tower = torch.nn.Linear(8, DIM).requires_grad_(False)
    parts = list(zip(torch.randn(12, 8).split(4), torch.arange(12).split(4), strict=True))

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        image = torch.nn.functional.normalize(image_tower(x), dim=1)
        text = torch.nn.functional.normalize(text_tower(x), dim=1)
        return image, text

    torch.manual_seed(0)
    encoded = [encode(x) for x, _ in parts]
    image = torch.cat([image for image, _ in encoded])
    text = torch.cat([text for _, text in encoded])
    loss = loss_of("fastclip_v3")(image, text, torch.arange(12))
    loss.backward()
    expected = image_tower[0].weight.grad.clone()
    image_tower.zero_grad()
    torch.manual_seed(0)
    with loss_of("fastclip_v3").accumulate() as passes:
        for x, index in parts:
            with passes.features():
                passes.add(*encode(x), index)
        assert torch.equal(passes.loss(), loss.detach())
        for x, _ in parts:
            with passes.gradients():
                passes.backward(*encode(x))
    assert torch.allclose(image_tower[0].weight.grad, expected, rtol=1e-5, atol=1e-7)
    assert text_tower.weight.grad is None
