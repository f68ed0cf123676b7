"""Synthetic profile: training steps on random pairs, to measure a configuration without data.

From the copy of a batch to the GPU until the update of the weights, a step runs the same code as in a run. There is no
loader, so step times exclude loading.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarking.method_config import FULL
from benchmarking.random_pairs import BATCHES, random_tokens, seed_of_batch
from benchmarking.run_loss import LossBuilder, build_loss
from benchmarking.stored_rows import stored_shapes
from neuclip_ds.config import Config, dump
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.feature_table import StoredFeatures
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.data.stored_towers import IMAGE, TEXT
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
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
    """Return a number of steps after which prototypes have been drawn or the queue is full; 0 if there is neither."""
    prototypes = prototypes_of(config)
    return math.ceil(prototypes / config.data.batch_size) + 1 if prototypes else 0


class SyntheticSteps:
    """Training steps on random pairs, with random weights; `data.train` is not read.

    As in a run, batches are pinned if there is a GPU, and copied to it during the previous step.

    Args:
        config: the config of the run.
        communicator: communicator between the run's ranks.
        lr: learning rate of all steps.
        build: function that builds the loss.
        batches: number of batches whose pixels and tokens are repeated.
        caption_tokens: lengths of the captions, as in `random_pairs.caption_lengths`.
        stored_width: width of all stored features, whose folders are then not read.

    Attributes:
        engine: the engine, which contains the towers.
        loss: the loss.
        parameters: number of parameters of the towers.
    """

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        lr: float = 1e-4,
        build: LossBuilder = build_loss,
        *,
        batches: int = BATCHES,
        caption_tokens: str = FULL,
        stored_width: int | None = None,
    ) -> None:
        engine_config = load_engine_config(config, communicator.world_size)
        query = MemoryQuery(config, communicator.world_size)
        self._query = query
        self._communicator = communicator
        self._lr = lr
        torch.manual_seed(config.run.seed)
        model = query.source.build(query.tokenizer)
        self.parameters = Parameters.of(model).total
        device_type = communicator.device.type
        compile_towers(model, resolve_compilation(config.model.compile, device_type, engine_config.zero_stage))
        self.engine = start_engine(model, config.optimizer, engine_config, communicator, config.run.seed)
        samples = EPOCH * config.data.batch_size
        comm_dtype = resolve_comm_dtype(config, engine_config)
        self.loss = build(config, query.source.embed_dim, samples, communicator, comm_dtype)
        self._stored_width = stored_width
        pack = None if TEXT in query.trunk_widths else self.engine.pack
        self._batches = DeviceBatches(communicator.device, query.micro_batch, pack)
        pairs = [self._pairs(number, caption_tokens) for number in range(batches)]
        self._batches.start(self._endless(pairs))

    def run(self, number: int) -> StepOutcome:
        """Run the next training step, as the trainer does; `number` counts the steps from 0."""
        position = Position(step=number, epoch=number // EPOCH, lr=self._lr, peak_lr=self._lr)
        loss = cast(ContrastiveLoss, self.loss)  # a baseline has the same interface
        return train_step(self.engine, loss, self._batches, next(self._batches), position)

    def _pairs(self, number: int, caption_tokens: str) -> tuple[Tensor, Tensor]:
        """Return noise: this rank's uint8 (b, 3, H, W) pixels and (b, T) ids of global batch `number`.

        If the config names stored outputs of a frozen trunk, (b, width) float32 noise replaces the trunk's inputs.
        """
        query = self._query
        rows = query.rank_batch
        seed = seed_of_batch(number, self._communicator.rank, query.world_size)
        generator = torch.Generator().manual_seed(seed)
        widths = query.trunk_widths
        if TEXT in widths:
            captions = torch.randn(rows, widths[TEXT], generator=generator)
        else:
            captions = random_tokens(caption_tokens, rows, query.tokenizer, generator)
        if IMAGE in widths:
            return torch.randn(rows, widths[IMAGE], generator=generator), captions
        shape = (rows, 3, query.image_size, query.image_size)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8), captions

    def _stored_features(self, generator: torch.Generator) -> dict[str, StoredFeatures]:
        """Return noise in place of the stored features that the config names, with their widths and dtypes."""
        if not isinstance(self.loss, ContrastiveLoss):  # baselines have no form with stored features
            return {}
        shapes = stored_shapes(self._query.config, self._stored_width)
        return {name: shape.random_rows(self._query.rank_batch, generator) for name, shape in shapes.items()}

    def _endless(self, pairs: list[tuple[Tensor, Tensor]]) -> Iterator[RankBatch]:
        """Yield the pairs in turn, each time with new indices, so that an epoch contains every sample once."""
        on_gpu = self._communicator.device.type == "cuda"
        rows = self._query.rank_batch
        size = rows * self._query.world_size
        generator = torch.Generator().manual_seed(0)
        permutation = torch.randperm(EPOCH * size, generator=generator)
        valid = torch.ones(rows, dtype=torch.bool)
        stored = self._stored_features(generator)
        batches = [Batch(image, tokens, permutation[:rows], valid, stored=stored) for image, tokens in pairs]
        if on_gpu:
            batches = [batch.pin_memory() for batch in batches]
        for number in itertools.count():
            batch = batches[number % len(batches)]
            start = number % EPOCH * size + self._communicator.rank * rows
            index = permutation[start : start + rows]
            if on_gpu:
                index = index.pin_memory()
            yield RankBatch([replace(batch, index=index)])


def run_synthetic_profile(
    config: Config,
    communicator: Communicator,
    folder: Path,
    name: str,
    after: int,
    build: LossBuilder = build_loss,
    *,
    caption_tokens: str = FULL,
    stored_width: int | None = None,
) -> None:
    """Profile `run.profile_steps` steps after the first `after` steps; write the profile, labeled `name`, to `folder`.

    `caption_tokens` and `stored_width` are as in `SyntheticSteps`.
    """
    steps = SyntheticSteps(config, communicator, build=build, caption_tokens=caption_tokens, stored_width=stored_width)
    count = config.run.profile_steps
    engine_config = load_engine_config(config, communicator.world_size)
    description = {
        "method": name,
        "zero_stage": engine_config.zero_stage,
        "precision": engine_config.precision.replace("fp32", "float32"),
        "batch_size": config.data.batch_size,
        "embed_dim": config.model.embed_dim,
        "parameters": steps.parameters,
    }
    if communicator.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(dump(config), encoding="utf-8")
    with Recorder(folder, communicator, count, after, description) as recorder:
        for number in range(after + count):
            with recorder.step():
                steps.run(number)
