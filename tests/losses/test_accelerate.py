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
    names = {"model": model, "dataset": pairs()}
    changes = {"Accelerator()": "Accelerator(cpu=True)", **changes}
    with recorded() as calls:
        names = run_code(code_blocks("Accelerate")[0], method, names, changes)
    return Trained.of(model, names["loss_fn"].temperature, calls)


@pytest.mark.parametrize(("method", "ranks"), METHODS_AND_RANKS)
def test_the_loop_and_a_resumed_one_equal_the_trainer(method: str, ranks: int, tmp_path: Path) -> None:
    resume = {"range(epochs)": "[1]", "\nfor epoch": '\naccelerator.load_state("runs/clip/epoch_0")\nfor epoch'}
    check_loop(_trained, method, ranks, tmp_path, resume)
