"""The page's Accelerate loop gives the weights of the project's trainer, on one process and on two, and resumes."""

import os
from pathlib import Path

import pytest
from ranks import run_ranks
from replay import (
    METHODS_AND_RANKS,
    RENDEZVOUS,
    Encoders,
    Trained,
    assert_equal,
    code_blocks,
    pairs,
    recorded,
    replay_encoders,
    run_code,
)

from neuclip_ds.distributed.communicator import Communicator

pytest.importorskip("accelerate")


def _trained(communicator: Communicator, method: str, folder: Path, changes: dict[str, str]) -> Trained:
    os.chdir(folder)
    os.environ.update(RENDEZVOUS)
    model = Encoders()
    with recorded() as calls:
        given, changes = {"model": model, "dataset": pairs()}, {"Accelerator()": "Accelerator(cpu=True)", **changes}
        names = run_code(code_blocks("Accelerate")[0], method, given, changes)
    return Trained.of(model, names["loss_fn"].temperature, calls)


@pytest.mark.parametrize(("method", "ranks"), METHODS_AND_RANKS)
def test_the_loop_equals_the_trainer(method: str, ranks: int, tmp_path: Path) -> None:
    found = run_ranks(ranks, _trained, method, tmp_path, {})
    assert len({call.lr for call in found[0].calls}) == len(found[0].calls) == 12 // ranks
    wanted = replay_encoders([rank.calls for rank in found], method)
    for rank in found:
        assert_equal(rank, wanted)
    second = {"range(epochs)": "[1]", "\nfor epoch": '\naccelerator.load_state("runs/clip/epoch_0")\nfor epoch'}
    resumed = run_ranks(ranks, _trained, method, tmp_path, second)
    before = len(found[0].calls) // 2
    calls = [[*first.calls[:before], *rest.calls] for first, rest in zip(found, resumed, strict=True)]
    wanted = replay_encoders(calls, method)
    for rank in resumed:
        assert_equal(rank, wanted)
