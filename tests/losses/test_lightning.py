"""The page's Lightning module gives the project trainer's weights on one and two processes, even when resumed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from replay import LR, METHODS_AND_RANKS, Encoders, Trained, check_loop, code_blocks, pairs, recorded, run_code
from torch.utils.data import DataLoader

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import IndexedDataset

lightning = pytest.importorskip("lightning")


class Clip(lightning.LightningModule):
    def __init__(self, encoders: Encoders) -> None:
        super().__init__()
        self.encoders = encoders

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.encoders.parameters(), LR)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _trained(communicator: Communicator, method: str, folder: Path, changes: dict[str, str]) -> Trained:
    os.chdir(folder)
    encoders = Encoders()
    every = lightning.pytorch.callbacks.ModelCheckpoint("saved", save_top_k=-1)
    options = {"accelerator": "cpu", "strategy": "ddp", "devices": communicator.world_size, "logger": False}
    changes = {
        "Trainer(max": "Trainer(**cpu, max",
        "[SaveLoss()]": "[SaveLoss(), every]",
        **changes,
    }
    names = {"Clip": Clip, "encoders": encoders, "every": every, "cpu": {**options, "enable_progress_bar": False}}
    names["train_loader"] = DataLoader(IndexedDataset(pairs()), batch_size=8, shuffle=True)
    names["val_loader"] = DataLoader(pairs(2)[:16], batch_size=8)
    with recorded() as calls:
        names = run_code(code_blocks("Lightning")[0], method, names, changes)
    (loss_fn,) = names["trainer"].lightning_module.losses
    assert 0 < float(names["trainer"].callback_metrics["val_loss"]) < 20
    return Trained.of(encoders, loss_fn.temperature, calls)


SLOW_ON_TWO = pytest.param("neuclip", 2, marks=pytest.mark.slow)  # takes 10 s; test_accelerate.py runs this case


@pytest.mark.parametrize(("method", "ranks"), [METHODS_AND_RANKS[0], SLOW_ON_TWO, *METHODS_AND_RANKS[2:]])
def test_the_module_and_a_resumed_one_equal_the_trainer(method: str, ranks: int, tmp_path: Path) -> None:
    resume = {"val_loader)": f"val_loader, ckpt_path='saved/epoch=0-step={6 // ranks}.ckpt')"}
    check_loop(_trained, method, ranks, tmp_path, resume)
