"""Helpers for checkpoints of tiny models, mostly without DeepSpeed."""

from pathlib import Path
from types import SimpleNamespace

import torch
from build import batch, objective, pairs, step
from torch import Tensor, nn

from neuclip_ds.checkpoint.checkpoints import Checkpoints
from neuclip_ds.checkpoint.engine_state import engine_facts, engine_shards
from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import start_engine
from neuclip_ds.losses.base import Objective
from neuclip_ds.state.shards import shard_files, table_shards

FACTS = {"seed": 0, "method": "neuclip"}
DATA = {"hash": "abc", "step": 0}


class PlainEngine(Engine):
    """Engine of a linear layer whose weights equal `value`, without DeepSpeed."""

    def __init__(self, value: float = 0.0) -> None:
        module = nn.Linear(2, 3)
        nn.init.constant_(module.weight, value)
        optimizer = torch.optim.AdamW(module.parameters())
        deepspeed_engine = SimpleNamespace(
            module=module,
            optimizer=optimizer,
            basic_optimizer=optimizer,
            global_steps=0,
            global_samples=0,
            skipped_steps=0,
        )
        super().__init__(deepspeed_engine, Communicator())

    @property
    def value(self) -> float:
        return float(self.module.get_parameter("weight").detach().mean())


class Layers(nn.Sequential):
    """Layers in a sequence, which an engine calls as `engine(rows, None)`."""

    def forward(self, rows: Tensor, tokens: None = None) -> Tensor:
        output: Tensor = super().forward(rows)
        return output


def gathered_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's weights by name; under ZeRO 3, all ranks call this together."""
    import deepspeed

    parameters = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


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


def save_engine(folder: Path, engine: Engine, communicator: Communicator) -> StateFiles:
    """Write the weights and optimizer state to a new folder, and return a reader; all ranks call this together."""
    communicator.on_rank_zero(lambda: folder.mkdir(parents=True))
    for file in shard_files(engine_shards(engine, communicator), engine_facts(engine), communicator):
        file.write(folder)
    communicator.barrier()
    return StateFiles(folder)


def small_engine(net: Layers, optimizer: OptimizerConfig, deepspeed: str, rows: int, ranks: Communicator) -> Engine:
    """Start an engine for `net`, given the name of a DeepSpeed config and the global batch size (`rows`)."""
    config = Config.model_validate({"data": {"batch_size": rows}, "deepspeed": deepspeed})
    return start_engine(net, optimizer, load_engine_config(config, ranks.world_size), ranks)


def save_tables(folder: Path, objective: Objective, communicator: Communicator | None = None) -> None:
    """Write an objective's partitioned tables; all ranks call this together."""
    for file in shard_files(table_shards(objective.row_tables()), {}, communicator or Communicator()):
        file.write(folder)
