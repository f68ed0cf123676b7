"""Helpers for checkpoints of tiny models, mostly without DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
from build import batch, objective, pairs, step
from torch import nn

from neuclip_ds.checkpoint.checkpoints import Checkpoints
from neuclip_ds.checkpoint.engine_state import engine_facts, engine_shards
from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.start import start_engine
from neuclip_ds.objectives.base import Objective
from neuclip_ds.state.shards import shard_files, table_shards

FACTS = {"seed": 0, "method": "neuclip"}
DATA = {"hash": "abc", "step": 0}


class PlainEngine:
    """Replacement for DeepSpeed's engine without ZeRO in float32: an unwrapped module and its optimizer."""

    def __init__(self, value: float = 0.0) -> None:
        self.module = nn.Linear(2, 3)
        nn.init.constant_(self.module.weight, value)
        self.optimizer = self.basic_optimizer = torch.optim.AdamW(self.module.parameters())
        self.global_steps = self.global_samples = self.skipped_steps = 0

    @property
    def value(self) -> float:
        return float(self.module.weight.detach().mean())


def fresh(communicator: Communicator | None = None) -> Objective:
    npn = {"prototypes": 6, "inner_steps": 1, "lr": 0.1}
    return objective("neuclip", communicator or Communicator(), 4, torch.float32, npn=npn)


def trained() -> Objective:
    built = fresh()
    for number in range(2):
        image, text = pairs(8, 4, seed=number)
        built(batch(image.float(), text.float()), step(number))
    return built


def keeper(folder: Path, keep: int = 2, communicator: Communicator | None = None) -> Checkpoints:
    trained_with = {"config.yaml": b"run: {}", "tokenizer/tokenizer.json": b"{}"}
    return Checkpoints(folder / "checkpoints", communicator or Communicator(), keep, trained_with)


def save_engine(folder: Path, engine: Any, communicator: Communicator) -> StateFiles:
    """Write the weights and optimizer state to a new folder, and return a reader; all ranks call this together."""
    communicator.on_rank_zero(lambda: folder.mkdir(parents=True))
    for file in shard_files(engine_shards(engine, communicator), engine_facts(engine), communicator):
        file.write(folder)
    communicator.barrier()
    return StateFiles(folder)


def small_engine(net: nn.Module, optimizer: OptimizerConfig, deepspeed: str, rows: int, ranks: Communicator) -> Any:
    """Start an engine for `net`, given the name of a DeepSpeed config and the global batch size (`rows`)."""
    config = Config.model_validate({"data": {"batch_size": rows}, "deepspeed": deepspeed})
    return start_engine(net, optimizer, load_engine_config(config, ranks.world_size), ranks)


def save_tables(folder: Path, objective: Objective, communicator: Communicator | None = None) -> None:
    """Write an objective's partitioned tables; all ranks call this together."""
    for file in shard_files(table_shards(objective.row_tables()), {}, communicator or Communicator()):
        file.write(folder)
