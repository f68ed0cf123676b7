"""Losses that are not in the package: registered functions and classes, their options, their state, and ranks."""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from ranks import run_ranks
from small_runs import call, demo_shards
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds import ContrastiveLoss, Section, UserError, autograd_loss, register_loss
from neuclip_ds.config import Config, dump
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import import_plugin
from neuclip_ds.losses.base import LossFunction, Stateful
from neuclip_ds.losses.methods import METHODS, REGISTERED_OPTIONS
from neuclip_ds.recipe import recipe_config
from neuclip_ds.state.partition import Partition, RowTable

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "custom_loss.md"
DIM = 6


def write_plugins(folder: Path) -> Path:
    """Write the files that the page tells readers to save, and return the folder."""
    blocks = re.findall(r"Save this file as `([\w.]+)`:\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["margin_loss.py", "centered_loss.py"]
    for name, text in blocks:
        assert text.count("\n") <= 60
        (folder / name).write_text(text)
    return folder


@contextmanager
def restored_registry() -> Iterator[None]:
    """Remove the losses that the block registers."""
    methods = dict(METHODS)
    options = dict(REGISTERED_OPTIONS)
    try:
        yield
    finally:
        METHODS.clear()
        METHODS.update(methods)
        REGISTERED_OPTIONS.clear()
        REGISTERED_OPTIONS.update(options)


@pytest.fixture
def registry() -> Iterator[None]:
    with restored_registry():
        yield


@pytest.fixture
def plugins(tmp_path: Path, registry: None) -> None:
    write_plugins(tmp_path)
    import_plugin(str(tmp_path / "margin_loss.py"))
    import_plugin(str(tmp_path / "centered_loss.py"))


def features(step: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    image, text = normalize(torch.randn(2, rows, DIM, generator=generator), dim=2).to(dtype)
    return image, text, torch.arange(rows)


def train(loss_fn: ContrastiveLoss, steps: range, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return the loss of the last step, and the (2, b, d) gradient of the given rows of its batch."""
    for step in steps:
        image, text, index = features(step, rows=8)
        pair = torch.stack([image[rows], text[rows]]).requires_grad_()
        loss = loss_fn(pair[0], pair[1], index[rows])
        loss.backward()
    assert pair.grad is not None
    return loss.detach(), pair.grad


def train_on_rank(communicator: Communicator, folder: str) -> list[tuple[Tensor, Tensor]]:
    results = []
    for name in ("margin", "centered"):
        import_plugin(f"{folder}/{name}_loss.py")
        size = 8 // communicator.world_size
        rows = slice(size * communicator.rank, size * (communicator.rank + 1))
        results.append(train(ContrastiveLoss(name, dim=DIM, samples=8, reduction="sum"), range(4), rows))
    return results


def test_the_losses_of_the_page_are_equal_on_one_rank_and_two(tmp_path: Path, registry: None) -> None:
    write_plugins(tmp_path)
    one_rank = train_on_rank(Communicator(), str(tmp_path))
    first, second = run_ranks(2, train_on_rank, str(tmp_path))
    for method, (loss, gradient) in enumerate(one_rank):
        for found in (first, second):
            torch.testing.assert_close(found[method][0], loss)
        both = torch.cat([first[method][1], second[method][1]], dim=1)
        torch.testing.assert_close(both, gradient)


def test_a_registered_function_is_differentiated_with_its_options(plugins: None) -> None:
    image, text, index = features(0, rows=5, dtype=torch.float64)
    pair = torch.stack([image, text]).requires_grad_()
    cosines = pair[0] @ pair[1].T - torch.diag(torch.full((5,), 0.3, dtype=torch.float64))
    logits = cosines / 0.5
    rows = logits.diagonal() - logits.logsumexp(dim=1)
    columns = logits.diagonal() - logits.logsumexp(dim=0)
    expected = -(rows + columns).mean() / 2
    (expected_gradient,) = torch.autograd.grad(expected, pair)

    loss_fn = ContrastiveLoss("margin", dim=DIM, samples=5, margin={"margin": 0.3}, temperature={"initial": 0.5})
    loss = loss_fn(pair[0], pair[1], index)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, pair)[0], expected_gradient)


def test_a_function_that_is_not_registered_is_a_loss() -> None:
    def mean_distance(image: Tensor, text: Tensor, index: Tensor) -> Tensor:
        return (image - text).square().sum(dim=1).mean()

    image, text, _ = features(0, rows=4)
    image.requires_grad_()
    loss = ContrastiveLoss(autograd_loss(mean_distance), dim=DIM)(image, text)
    loss.backward()
    torch.testing.assert_close(loss, (image - text).square().sum() / 4)
    torch.testing.assert_close(image.grad, (image.detach() - text) / 2)


def test_a_function_is_evaluated_in_inference_mode_and_must_depend_on_the_features() -> None:
    image, text, _ = features(0, rows=4)
    by_distance = ContrastiveLoss(autograd_loss(lambda image, text, index: (image - text).norm()), dim=DIM).eval()
    expected = by_distance(image, text)
    with torch.inference_mode():
        found = by_distance(image.detach().clone(), text.detach().clone())
    assert torch.equal(found, expected)
    with pytest.raises(TypeError, match="must depend on the features"):
        ContrastiveLoss(autograd_loss(lambda image, text, index: torch.tensor(1.0)), dim=DIM)(image, text)


def test_options_of_a_registered_loss_are_a_section_of_the_config(plugins: None) -> None:
    tree = {"objective": {"method": "margin", "margin": {"margin": 0.3}}}
    config = Config.model_validate(tree)
    assert config.objective.margin.margin == 0.3  # type: ignore[attr-defined]
    assert "  margin:\n    margin: 0.3\n" in dump(config)
    assert "margin" not in dump(Config())
    assert dump(recipe_config("demo", {"objective": tree["objective"]})) == dump(
        recipe_config("demo", {"objective.method": "margin", "objective.margin.margin": 0.3})
    )
    for wrong, message in (
        ({"margn": 0.3}, r"unknown key objective\.margin\.margn; did you mean objective\.margin\.margin"),
        ({"margin": 2}, r"objective\.margin\.margin=2: Input should be less than 1"),
    ):
        with pytest.raises(UserError, match=message):
            recipe_config("demo", {"objective.method": "margin", "objective.margin": wrong})
        with pytest.raises(ValidationError):
            Config.model_validate({"objective": {"method": "margin", "margin": wrong}})
        with pytest.raises(UserError, match=r"options of method margin are invalid: .*margin\.mar"):
            ContrastiveLoss("margin", dim=DIM, margin=wrong)
    with pytest.raises(UserError, match=r"does not use objective\.margin\.margin; these methods do: margin"):
        recipe_config("demo", {"objective.method": "openclip", "objective.margin.margin": 0.3})


def test_a_name_or_options_that_cannot_be_used_are_refused(registry: None) -> None:
    class NoDefault(Section):
        width: int

    builder = autograd_loss(lambda image, text, index: image.sum())
    for name in ("openclip", "temperature", "warnings"):
        with pytest.raises(UserError, match=f"{name} is already the name"):
            register_loss(name, builder)
    for name in ("my loss", "class", "_mine"):
        with pytest.raises(UserError, match="cannot name a loss"):
            register_loss(name, builder)
    with pytest.raises(UserError, match=r"every option of mine needs a valid default \(width: Field required\)"):
        register_loss("mine", builder, NoDefault)
    register_loss("mine", builder)
    register_loss("mine", builder)  # as in a notebook cell that is run again
    with pytest.raises(UserError, match=r"these methods do: openclip, .*, gcl\. "):
        ContrastiveLoss("siglip", dim=4, reference_model="features")
    assert METHODS["mine"].estimates_normalizers is False


class WeightOptions(Section):
    weight: float = 1.0


def mean_distance(image: Tensor, text: Tensor, index: Tensor) -> Tensor:
    return (image - text).square().sum(dim=1).mean()


def test_configs_and_losses_with_registered_options_can_be_pickled(registry: None) -> None:
    register_loss("distance", autograd_loss(mean_distance), WeightOptions)
    config = recipe_config("demo", {"objective.method": "distance", "objective.distance.weight": 0.5})
    sent = pickle.loads(pickle.dumps(config))
    assert dump(sent) == dump(config)
    assert sent.objective.distance.weight == 0.5
    loss_fn = ContrastiveLoss("distance", dim=DIM, distance={"weight": 0.5})
    sent_loss = pickle.loads(pickle.dumps(loss_fn))
    assert sent_loss.config.model_dump() == loss_fn.config.model_dump()
    assert torch.equal(train(sent_loss, range(1))[0], train(loss_fn, range(1))[0])


def test_a_skipped_step_leaves_the_state_of_a_custom_loss_unchanged(plugins: None) -> None:
    loss_fn = ContrastiveLoss("centered", dim=DIM, samples=8, undo=True)
    train(loss_fn, range(2))
    before = loss_fn.function.replicated_state()["means"].clone()
    assert before.any()
    train(loss_fn, range(2, 3))
    assert not torch.equal(loss_fn.function.replicated_state()["means"], before)
    loss_fn.undo()
    assert torch.equal(loss_fn.function.replicated_state()["means"], before)
    with torch.no_grad():
        loss_fn(*features(3, rows=8))
    assert torch.equal(loss_fn.function.replicated_state()["means"], before)


def test_the_saved_state_of_a_custom_loss_continues_with_the_same_bits(plugins: None, tmp_path: Path) -> None:
    loss_fn = ContrastiveLoss("centered", dim=DIM, samples=8)
    train(loss_fn, range(2))
    loss_fn.save(tmp_path / "loss")
    resumed = {"folder": ContrastiveLoss("centered", dim=DIM, samples=8)}
    resumed["folder"].load(tmp_path / "loss")
    resumed["state_dict"] = ContrastiveLoss("centered", dim=DIM, samples=8)
    resumed["state_dict"].load_state_dict(loss_fn.state_dict())
    loss, gradient = train(loss_fn, range(2, 4))
    for other in resumed.values():
        other_loss, other_gradient = train(other, range(2, 4))
        assert torch.equal(other_loss, loss)
        assert torch.equal(other_gradient, gradient)


class Rows(Stateful):
    """A component with one table of rows."""

    def row_tables(self) -> dict[str, RowTable]:
        return {"rows": RowTable(Partition.of(4, 0, 1), {"values": torch.zeros(4)})}


def test_tables_of_one_name_in_two_components_are_refused() -> None:
    assert LossFunction({"first.": Rows()}).row_tables().keys() == {"rows"}
    with pytest.raises(ValueError, match="Two components of the loss have a table 'rows'"):
        LossFunction({"first.": Rows(), "second.": Rows()}).row_tables()


def test_the_minimal_loop_trains_with_a_plugin(tmp_path: Path) -> None:
    data = demo_shards(tmp_path / "data", pairs=64, held_out=16).parent
    plugin = write_plugins(tmp_path) / "margin_loss.py"
    options = [f"--data={data}", f"--plugin={plugin}", "--method=margin", "--batch=32", "--epochs=2"]
    output = call("tools/minimal_loop.py", *options).stdout
    first, second = (float(loss) for loss in re.findall(r": loss ([0-9.]+)", output))
    assert second < first
