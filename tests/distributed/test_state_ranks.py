"""Check that training continues unchanged if every method's state is loaded by a different number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from build import VARIANTS, build_loss, call, pairs, position
from ranks import run_ranks
from small_checkpoints import save_tables
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.section import merge
from neuclip_ds.state.shards import ShardFiles

ROWS = 12
DIM = 5
SAVED_AFTER = 3  # steps, in the middle of an epoch


def build(name: str, communicator: Communicator) -> ContrastiveLoss:
    method, options = VARIANTS[name]
    return build_loss(method, communicator, DIM, **merge(options, {"temperature": {"rho": 2.0, "lr": 0.02}}))


def one_step(loss: ContrastiveLoss, communicator: Communicator, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's gradients of the features, (12 / K, 5) each, and the loss."""
    share = ROWS // communicator.world_size
    local = slice(communicator.rank * share, (communicator.rank + 1) * share)
    image, text = pairs(ROWS, DIM, seed=number)
    index = torch.arange(ROWS) * 7
    result = call(loss, image[local], text[local], index[local], at=position(number, epoch=number // 2))
    return result.image, result.text, result.loss


def save(communicator: Communicator, folder: Path) -> None:
    """Run the first steps of every method, and save its state to disk."""
    for name in VARIANTS:
        loss = build(name, communicator)
        for number in range(SAVED_AFTER):
            one_step(loss, communicator, number)
        target = folder / name
        target.mkdir(exist_ok=True)
        save_tables(target, loss.function, communicator)
        if communicator.rank == 0:
            torch.save(loss.function.replicated_state(), target / "replicated.pt")


def resume(communicator: Communicator, folder: Path) -> dict[str, Any]:
    """Load the state of every method, and return the results of the next two steps."""
    results = {}
    for name in VARIANTS:
        loss = build(name, communicator)
        ShardFiles(folder / name).fill(loss.function.row_tables())
        loss.function.load_replicated_state(torch.load(folder / name / "replicated.pt", weights_only=True))
        results[name] = [one_step(loss, communicator, SAVED_AFTER + number) for number in range(2)]
    return results


def uninterrupted() -> dict[str, Any]:
    """Return the results of the same two steps on one rank that is not interrupted."""
    results = {}
    for name in VARIANTS:
        loss = build(name, Communicator())
        steps = [one_step(loss, Communicator(), number) for number in range(SAVED_AFTER + 2)]
        results[name] = steps[SAVED_AFTER:]
    return results


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(1, 3, marks=pytest.mark.slow)],
)
def test_every_method_continues_unchanged_with_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    def run(world_size: int, work: Any) -> list[Any]:
        if world_size > 1:
            return run_ranks(world_size, work, tmp_path)
        return [work(Communicator(), tmp_path)]

    run(before, save)
    expected = uninterrupted()
    results_of_ranks = run(after, resume)
    for name in VARIANTS:
        for number in range(2):
            expected_image, expected_text, expected_loss = expected[name][number]
            image = torch.cat([results[name][number][0] for results in results_of_ranks])
            text = torch.cat([results[name][number][1] for results in results_of_ranks])
            loss = results_of_ranks[0][name][number][2]
            torch.testing.assert_close(image, expected_image, rtol=1e-8, atol=1e-12, msg=name)
            torch.testing.assert_close(text, expected_text, rtol=1e-8, atol=1e-12, msg=name)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=0)
