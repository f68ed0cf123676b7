"""Helpers for checkpoints of tiny models, mostly without DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from neuclip_ds.checkpoint.checkpoints import Checkpoints
from neuclip_ds.checkpoint.engine_state import engine_metadata, engine_shards
from neuclip_ds.checkpoint.sharded_state import StateFiles
from neuclip_ds.config import Config, OptimizerConfig
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.engine import Engine
from neuclip_ds.engine.start import start_engine
from neuclip_ds.losses.base import LossFunction
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.state.shards import shard_files, table_shards

FACTS = {"seed": 0, "method": "neuclip"}
DATA = {"hash": "abc", "step": 0}


class PlainDeepSpeed:
    """The part of DeepSpeed's engine that `Engine` uses, for one rank and in plain PyTorch."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer
        self.basic_optimizer = optimizer  # without ZeRO
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        pass

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()


class PlainEngine(Engine):
    """Engine of a linear layer whose weights equal `value`, without DeepSpeed."""

    def __init__(self, value: float = 0.0) -> None:
        module = nn.Linear(2, 3)
        nn.init.constant_(module.weight, value)
        super().__init__(PlainDeepSpeed(module, torch.optim.AdamW(module.parameters())), Communicator())

    @property
    def value(self) -> float:
        return float(self.module.get_parameter("weight").detach().mean())


class Layers(nn.Sequential):
    """Layers in a sequence, which an engine calls as `engine(rows, None)`."""

    def forward(self, rows: Tensor, *options: Any) -> Tensor:
        output: Tensor = super().forward(rows)
        return output


def gathered_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's weights by name; under ZeRO 3, all ranks call this together."""
    import deepspeed

    parameters = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


def neuclip_loss(communicator: Communicator | None = None) -> ContrastiveLoss:
    npn = {"prototypes": 6, "inner_steps": 1, "lr": 0.1}
    communicator = communicator or Communicator()
    return ContrastiveLoss("neuclip", dim=4, samples=1000, communicator=communicator, spare_row=False, npn=npn)


def fresh(communicator: Communicator | None = None) -> LossFunction:
    """Return a loss that has not been trained."""
    return neuclip_loss(communicator).function


def trained() -> LossFunction:
    """Return a loss after two training calls."""
    loss = neuclip_loss()
    torch.manual_seed(0)
    for _ in range(2):
        image, text = normalize(torch.randn(2, 8, 4), dim=-1)
        loss(image.requires_grad_(), text, torch.arange(8))
    return loss.function


def keeper(folder: Path, keep: int = 2, communicator: Communicator | None = None) -> Checkpoints:
    extra_files = {"config.yaml": b"run: {}", "tokenizer/tokenizer.json": b"{}"}
    return Checkpoints(folder / "checkpoints", communicator or Communicator(), keep, extra_files)


def save_engine(folder: Path, engine: Engine, communicator: Communicator) -> StateFiles:
    """Write the weights and optimizer state to a new folder, and return a reader; all ranks call this together."""
    communicator.on_rank_zero(lambda: folder.mkdir(parents=True))
    for file in shard_files(engine_shards(engine, communicator), engine_metadata(engine), communicator):
        file.write(folder)
    communicator.barrier()
    return StateFiles(folder)


def small_engine(net: Layers, optimizer: OptimizerConfig, deepspeed: str, rows: int, ranks: Communicator) -> Engine:
    """Start an engine for `net`, given the name of a DeepSpeed config and the global batch size (`rows`)."""
    config = Config.model_validate({"data": {"batch_size": rows}, "deepspeed": deepspeed})
    return start_engine(net, optimizer, load_engine_config(config, ranks.world_size), ranks)


def save_tables(folder: Path, loss: LossFunction, communicator: Communicator | None = None) -> None:
    """Write a loss's partitioned tables; all ranks call this together."""
    for file in shard_files(table_shards(loss.row_tables()), {}, communicator or Communicator()):
        file.write(folder)
