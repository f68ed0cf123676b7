"""Synthetic profile: training steps on random pairs, to measure a configuration without data.

Everything from the towers onward is the same as in a run. There is no loader, so steps exclude its time.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.training.step import TrainStep

from neuclip_ds.config import Config, dump
from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config, precision, zero_stage
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.losses.base import Context, FeatureGradients, Objective, Step
from neuclip_ds.models.trained_parts import Parameters
from neuclip_ds.planning.memory import MemoryQuery
from neuclip_ds.profiling.recorder import Recorder

Build = Callable[[Config, Context, torch.dtype], Objective]
CONFIG = "config.yaml"  # file next to breakdown.json
EPOCH = 100  # steps per epoch of the dataset that the indices are drawn from
_TOKENS = 512  # vocabulary size assumed for a pretrained tokenizer that does not report one


def prototypes_of(config: Config) -> int:
    """Return the method's number m of prototypes or of queue entries, or 0 if it has neither."""
    sections = find_method(config.objective.method).sections
    sizes = {"npn": config.objective.npn.prototypes, "queue": config.objective.queue.size}
    return max((size for name, size in sizes.items() if name in sections), default=0)


def first_prediction(config: Config) -> int:
    """Return the first step at which all prototypes are drawn from samples, or 0 if there are no prototypes."""
    prototypes = prototypes_of(config)
    return math.ceil(prototypes / config.data.batch_size) + 1 if prototypes else 0


class SyntheticSteps:
    """Training steps on random pairs, with random weights; `data.train` is not read.

    Attributes:
        engine: DeepSpeed's engine around the towers.
        objective: the objective whose steps run.
        parameters: number of parameters of the towers.
    """

    def __init__(
        self, config: Config, communicator: Communicator, lr: float = 1e-4, build: Build = build_objective
    ) -> None:
        engine_config = load_engine_config(config, communicator.world_size)
        query = MemoryQuery(config, communicator.world_size)
        self._query = query
        self._rank = communicator.rank
        self._lr = lr
        torch.manual_seed(config.run.seed)
        model = query.source.build(query.tokenizer)
        self.parameters = Parameters.of(model).total
        if config.model.compile:
            model.compile_towers()
        self.engine = start_engine(model, config.optimizer, engine_config, communicator, config.run.seed)
        context = Context(query.source.embed_dim, EPOCH * config.data.batch_size, communicator)
        self.objective = build(config, context, resolve_comm_dtype(config, engine_config))
        self._step = TrainStep(self.engine, self.objective, communicator, query.micro_batch, config.run.seed)

    def batch(self, number: int) -> Batch:
        """Return this rank's rows of global batch `number`, which is noise with distinct indices."""
        query = self._query
        rows = query.rank_batch
        samples = EPOCH * query.config.data.batch_size
        generator = torch.Generator().manual_seed(number)
        index = torch.randperm(samples, generator=generator)[self._rank * rows : (self._rank + 1) * rows]
        generator.manual_seed(number * query.world_size + self._rank)
        shape = (rows, 3, query.image_size, query.image_size)
        image = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        vocabulary = getattr(query.tokenizer, "vocab_size", _TOKENS)
        tokens = torch.randint(2, vocabulary, (rows, query.tokenizer.context_length), generator=generator)
        tokens[:, 0] = 0  # BOS
        tokens[:, -1] = 1  # EOS
        return Batch(image, tokens, index, torch.ones(rows, dtype=torch.bool))

    def run(self, number: int, batch: Batch) -> FeatureGradients:
        """Run a training step and return the feature gradients."""
        return self._step(batch, Step(number, number // EPOCH, self._lr, self._lr)).gradients


def run_synthetic_profile(
    config: Config, communicator: Communicator, folder: Path, name: str, after: int, build: Build = build_objective
) -> None:
    """Profile `run.profile_steps` steps after the first `after` steps; write tables with `name` to `folder`."""
    steps = SyntheticSteps(config, communicator, build=build)
    count = config.run.profile_steps
    engine_config = load_engine_config(config, communicator.world_size)
    labels = {
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
    with Recorder(folder, communicator, count, after, labels) as recorder:
        for number in range(after + count):
            batch = steps.batch(number)
            with recorder.step():
                steps.run(number, batch)
