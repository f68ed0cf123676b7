"""The page's Accelerate loop gives the project trainer's weights on one and two processes, even when resumed."""

import os
from pathlib import Path

import pytest
from replay import METHODS_AND_RANKS, RENDEZVOUS, Encoders, Trained, check_loop, code_blocks, pairs, recorded, run_code

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
    second = {"range(epochs)": "[1]", "\nfor epoch": '\naccelerator.load_state("runs/clip/epoch_0")\nfor epoch'}
    check_loop(_trained, method, ranks, tmp_path, second)
