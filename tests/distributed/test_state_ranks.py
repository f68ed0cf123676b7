"""Check that training continues unchanged if every method's state is loaded by a different number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from build import VARIANTS, batch, objective, pairs, step
from ranks import run_ranks
from small_checkpoints import save_tables
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.section import merge
from neuclip_ds.state.shards import ShardFiles

ROWS, DIM = 12, 5


def build(name: str, communicator: Communicator) -> Any:
    method, options = VARIANTS[name]
    return objective(method, communicator, DIM, **merge(options, {"temperature": {"rho": 2.0, "lr": 0.02}}))


def one_step(built: Any, communicator: Communicator, number: int) -> tuple[Tensor, Tensor, Tensor]:
    share = ROWS // communicator.world_size
    mine = slice(communicator.rank * share, (communicator.rank + 1) * share)
    image, text = pairs(ROWS, DIM, seed=number)
    index = torch.arange(ROWS) * 7
    found = built(batch(image[mine], text[mine], index[mine]), step(number, epoch=number // 2))
    return found.image, found.text, found.loss


def save(communicator: Communicator, folder: Path) -> None:
    """Run three steps of every method, and save its state to disk."""
    for name in VARIANTS:
        built = build(name, communicator)
        for number in range(3):
            one_step(built, communicator, number)
        target = folder / name
        target.mkdir(exist_ok=True)
        save_tables(target, built, communicator)
        if communicator.rank == 0:
            torch.save(built.replicated_state(), target / "replicated.pt")


def resume(communicator: Communicator, folder: Path) -> dict[str, Any]:
    results = {}
    for name in VARIANTS:
        built = build(name, communicator)
        ShardFiles(folder / name).fill(built.row_tables())
        built.load_replicated_state(torch.load(folder / name / "replicated.pt", weights_only=True))
        results[name] = [one_step(built, communicator, number) for number in (3, 4)]
    return results


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 2), (1, 3)))]
)
def test_another_world_size(before: int, after: int, tmp_path: Path) -> None:
    def on(world_size: int, work: Any) -> list[Any]:
        return run_ranks(world_size, work, tmp_path) if world_size > 1 else [work(Communicator(), tmp_path)]

    on(before, save)
    wanted = without_a_break()
    found = on(after, resume)
    for name in VARIANTS:
        for number in range(2):
            for part in (0, 1):
                whole = torch.cat([rank[name][number][part] for rank in found])
                torch.testing.assert_close(whole, wanted[name][number][part], rtol=1e-8, atol=1e-12, msg=name)
            torch.testing.assert_close(found[0][name][number][2], wanted[name][number][2], rtol=1e-9, atol=0)


def without_a_break() -> dict[str, Any]:
    results = {}
    for name in VARIANTS:
        built = build(name, Communicator())
        results[name] = [one_step(built, Communicator(), number) for number in range(5)][3:]
    return results
