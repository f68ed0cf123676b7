"""Synthetic profile: training steps on random pairs, to measure a configuration without data.

Everything from the towers onward is the same as in a run. There is no loader, so steps exclude its time.
"""

import math
from pathlib import Path
from typing import cast

import torch

from benchmarking.run_loss import LossBuilder, build_loss
from neuclip_ds.config import Config, dump
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config, precision, zero_stage
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.losses.base import Position
from neuclip_ds.losses.contrastive_loss import ContrastiveLoss
from neuclip_ds.losses.methods import find_method
from neuclip_ds.models.compilation import compile_towers, resolve_compilation
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.training.step import StepOutcome, train_step

CONFIG = "config.yaml"  # file next to breakdown.json
EPOCH = 100  # steps per epoch of the dataset that the indices are drawn from
_TOKENS = 512  # vocabulary size assumed for a pretrained tokenizer that does not report one


def prototypes_of(config: Config) -> int:
    """Return the method's number m of prototypes or of queue entries, or 0 if it has neither."""
    objective = config.objective
    sections = find_method(objective.method).sections
    if "npn" in sections:
        return objective.npn.prototypes
    if "queue" in sections:
        return objective.queue.size
    return 0


def first_prediction(config: Config) -> int:
    """Return the first step at which all prototypes are drawn from samples, or 0 if there are no prototypes."""
    prototypes = prototypes_of(config)
    return math.ceil(prototypes / config.data.batch_size) + 1 if prototypes else 0


class SyntheticSteps:
    """Training steps on random pairs, with random weights; `data.train` is not read.

    Attributes:
        engine: the engine around the towers.
        loss: the loss.
        parameters: number of parameters of the towers.
    """

    def __init__(
        self, config: Config, communicator: Communicator, lr: float = 1e-4, build: LossBuilder = build_loss
    ) -> None:
        engine_config = load_engine_config(config, communicator.world_size)
        query = MemoryQuery(config, communicator.world_size)
        self._query = query
        self._rank = communicator.rank
        self._lr = lr
        torch.manual_seed(config.run.seed)
        model = query.source.build(query.tokenizer)
        self.parameters = Parameters.of(model).total
        device_type = communicator.device.type
        compile_towers(model, resolve_compilation(config.model.compile, device_type, zero_stage(engine_config)))
        self.engine = start_engine(model, config.optimizer, engine_config, communicator, config.run.seed)
        samples = EPOCH * config.data.batch_size
        comm_dtype = resolve_comm_dtype(config, engine_config)
        self.loss = build(config, query.source.embed_dim, samples, communicator, comm_dtype)
        self._batches = DeviceBatches(communicator.device, query.micro_batch, self.engine.pack)

    def batch(self, number: int) -> Batch:
        """Return this rank's rows of global batch `number`, which is noise with distinct indices."""
        query = self._query
        rows = query.rank_batch
        samples = EPOCH * query.config.data.batch_size
        generator = torch.Generator().manual_seed(number)
        permutation = torch.randperm(samples, generator=generator)
        index = permutation[self._rank * rows : (self._rank + 1) * rows]
        generator.manual_seed(number * query.world_size + self._rank)
        shape = (rows, 3, query.image_size, query.image_size)
        image = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        vocabulary = getattr(query.tokenizer, "vocab_size", _TOKENS)
        tokens = torch.randint(2, vocabulary, (rows, query.tokenizer.context_length), generator=generator)
        tokens[:, 0] = 0
        tokens[:, -1] = 1
        return Batch(image, tokens, index, torch.ones(rows, dtype=torch.bool))

    def run(self, number: int, batch: Batch) -> StepOutcome:
        """Run a training step, as the trainer does; the batch can be used again."""
        self._batches.start(iter([RankBatch([batch])]))
        position = Position(step=number, epoch=number // EPOCH, lr=self._lr, peak_lr=self._lr)
        loss = cast(ContrastiveLoss, self.loss)  # a baseline has the same interface
        return train_step(self.engine, loss, self._batches, next(self._batches), position)


def run_synthetic_profile(
    config: Config,
    communicator: Communicator,
    folder: Path,
    name: str,
    after: int,
    build: LossBuilder = build_loss,
) -> None:
    """Profile `run.profile_steps` steps after the first `after` steps; write tables with `name` to `folder`."""
    steps = SyntheticSteps(config, communicator, build=build)
    count = config.run.profile_steps
    engine_config = load_engine_config(config, communicator.world_size)
    description = {
        "method": name,
        "zero_stage": zero_stage(engine_config),
        "precision": precision(engine_config).replace("fp32", "float32"),
        "batch_size": config.data.batch_size,
        "embed_dim": config.model.embed_dim,
        "parameters": steps.parameters,
    }
    if communicator.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(dump(config), encoding="utf-8")
    with Recorder(folder, communicator, count, after, description) as recorder:
        for number in range(after + count):
            batch = steps.batch(number)
            with recorder.step():
                steps.run(number, batch)
