"""The loss of prefixes is the sum of the losses of the cut and normalized features, differentiated by autograd."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from build import VARIANTS, build_loss, call, columns, pairs, position
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss

ROWS = 12
DIM = 8
PREFIXES = {3: 0.5, 5: 2.0}
STEPS = 3
ON_RANKS = ["openclip", "siglip", "fastclip_v3", "isogclr", "neuclip", "neuclip_queue"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The (B, d) features of a step, the sample indices, and which rows are valid."""

    image: Tensor
    text: Tensor
    index: Tensor
    valid: Tensor

    @classmethod
    def of(cls, number: int) -> Batch:
        """Return the batch of a step; in the second one, rows are missing, unevenly over ranks."""
        image, text = pairs(ROWS, DIM, seed=number)
        valid = torch.ones(ROWS, dtype=torch.bool)
        if number == 1:
            valid[[0, 7, 9, 10]] = False
        return cls(image=image, text=text, index=torch.arange(ROWS) + 3 * number, valid=valid)

    def rows(self, rank: int, world_size: int) -> slice:
        """Return the rows of a rank."""
        share = ROWS // world_size
        return slice(rank * share, (rank + 1) * share)


def run_variant(
    variant: str, communicator: Communicator, micro_batches: tuple[int, int] | None = None
) -> list[dict[str, Tensor]]:
    """Return the loss, the gradients of this rank's rows and the metrics of each step."""
    method, options = VARIANTS[variant]
    loss_fn = build_loss(method, communicator, DIM, prefixes=PREFIXES, **options)
    results: list[dict[str, Tensor]] = []
    for number in range(STEPS):
        batch = Batch.of(number)
        rows = batch.rows(communicator.rank, communicator.world_size)
        result = call(
            loss_fn,
            batch.image[rows],
            batch.text[rows],
            batch.index[rows],
            batch.valid[rows],
            at=position(number),
            micro_batches=micro_batches,
        )
        results.append({"loss": result.loss, "image": result.image, "text": result.text, **result.metrics})
    return results


def expected_steps(variant: str) -> list[dict[str, Tensor]]:
    """Return the same values for the whole batch, from a separate loss of each width."""
    method, options = VARIANTS[variant]
    losses = {length: build_loss(method, Communicator(), length, **options) for length in (DIM, *PREFIXES)}
    results: list[dict[str, Tensor]] = []
    for number in range(STEPS):
        batch = Batch.of(number)
        image = batch.image.requires_grad_()
        text = batch.text.requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        metrics: dict[str, Tensor] = {}
        for length, loss_fn in losses.items():
            unit_image = normalize(image[:, :length], dim=1) if length < DIM else image
            unit_text = normalize(text[:, :length], dim=1) if length < DIM else text
            value = loss_fn(unit_image, unit_text, batch.index, batch.valid, position=position(number))
            total = total + PREFIXES.get(length, 1.0) * value
            prefix = f"prefix{length}/" if length < DIM else ""
            for name, metric in loss_fn.metric_tensors.items():
                metrics[prefix + name] = metric
        image_gradient, text_gradient = torch.autograd.grad(total, (image, text))
        squared_norm = image_gradient.square().sum() + text_gradient.square().sum()
        metrics["feature_grad_norm"] = squared_norm.sqrt()
        results.append({"loss": total.detach(), "image": image_gradient, "text": text_gradient, **metrics})
    return results


def assert_equal(results: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], rank: int, ranks: int) -> None:
    for number, (result, values) in enumerate(zip(results, expected, strict=True)):
        rows = Batch.of(number).rows(rank, ranks)
        for name, value in values.items():
            exact = value[rows] if name in ("image", "text") else value
            torch.testing.assert_close(result[name], exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_weighted_sum_of_the_losses_of_normalized_prefixes(variant: str) -> None:
    assert_equal(run_variant(variant, Communicator()), expected_steps(variant), 0, 1)


def run_on_a_rank(communicator: Communicator) -> dict[str, list[dict[str, Tensor]]]:
    return {variant: run_variant(variant, communicator, micro_batches=(2, 1)) for variant in ON_RANKS}


def test_several_ranks_and_micro_batches_give_the_same_values() -> None:
    results = run_ranks(3, run_on_a_rank)
    for variant in ON_RANKS:
        expected = expected_steps(variant)
        for rank, of_rank in enumerate(results):
            assert_equal(of_rank[variant], expected, rank, len(results))


@pytest.mark.parametrize("method", ["fastclip_v3", "neuclip_queue"])
def test_a_saved_state_continues_with_equal_steps(method: str, tmp_path: Path) -> None:
    def build() -> ContrastiveLoss:
        return build_loss(method, dim=DIM, prefixes=PREFIXES)

    def step(loss_fn: ContrastiveLoss, number: int) -> Tensor:
        batch = Batch.of(number)
        return call(loss_fn, batch.image, batch.text, batch.index, at=position(number)).loss

    loss_fn = build()
    step(loss_fn, 0)
    loss_fn.save(tmp_path / "state")
    resumed = build()
    resumed.load(tmp_path / "state")
    assert torch.equal(step(loss_fn, 2), step(resumed, 2))
    with pytest.raises(UserError, match="prefixes"):
        build_loss(method, dim=DIM, prefixes={3: 0.5}).load(tmp_path / "state")
    with pytest.raises(UserError, match="prefixes"):
        build_loss(method, dim=DIM).load(tmp_path / "state")


def test_undo_reverts_the_state_of_prefixes() -> None:
    loss_fn = build_loss("isogclr", dim=DIM, prefixes=PREFIXES)
    batch = Batch.of(0)
    call(loss_fn, batch.image, batch.text, batch.index)
    before = {name: columns(table) for name, table in loss_fn.function.row_tables().items()}
    copies = {name: {key: value.clone() for key, value in rows.items()} for name, rows in before.items()}
    assert len(copies) > len(build_loss("isogclr", dim=DIM).function.row_tables())
    later = Batch.of(2)
    call(loss_fn, later.image, later.text, batch.index, at=position(1))
    loss_fn.undo()
    for name, table in loss_fn.function.row_tables().items():
        for key, value in columns(table).items():
            assert torch.equal(value, copies[name][key]), (name, key)


def test_estimates_of_normalizers_are_those_of_the_whole_features() -> None:
    batch = Batch.of(0)
    estimates: list[Tensor] = []
    for prefixes in (PREFIXES, {}):
        loss_fn = build_loss("fastclip_v3", dim=DIM, prefixes=prefixes)
        call(loss_fn, batch.image, batch.text, batch.index)
        estimates.append(loss_fn.log_normalizers(batch.image, batch.text, batch.index))
    assert torch.equal(estimates[0], estimates[1])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prefixes": {DIM: 1.0}}, "shorter"),
        ({"prefixes": {0: 1.0}}, "prefixes"),
        ({"prefixes": {4: 0.0}}, "prefixes"),
        ({"prefixes": {4: 1.0}, "reference_model": "folder"}, "reference_model"),
        ({"prefixes": {4: 1.0}, "distill": {"features": "folder"}}, "distill"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        build_loss("openclip", dim=DIM, **options)


def test_stored_features_are_refused_by_name() -> None:
    loss_fn = build_loss("openclip", dim=DIM, prefixes=PREFIXES)
    image, text = pairs(ROWS, DIM)
    for name in ("reference", "teacher"):
        with pytest.raises(ValueError, match="prefixes"):
            call(loss_fn, image, text, **{name: (image, text)})
