"""The synthetic profile: training steps on random pairs, to measure a configuration without data.

Everything from the towers on is that of a run; there is no loader, so a step does not include its time.
"""

import math
from pathlib import Path
from typing import Any

import torch

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config, precision, zero_stage
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import parameter_count
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, FeatureGradients, Step
from neuclip_ds.planning.memory import MemoryQuery, StandInTokenizer
from neuclip_ds.planning.objective_cost import Build, prototypes_of
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.recipe import dump
from neuclip_ds.training.step import TrainStep

CONFIG = "config.yaml"  # next to the breakdown
EPOCH = 100  # steps of the data set that the indices are drawn from
_LR = 1e-4
_TOKENS = 512  # of a pretrained tokenizer that does not tell its vocabulary


def first_prediction(config: Config) -> int:
    """Return the first step that has all prototypes to compare with, drawn from as many samples; 0 without any."""
    prototypes = prototypes_of(config)
    return math.ceil(prototypes / config.data.batch_size) + 1 if prototypes else 0


class SyntheticSteps:
    """The steps of a run on random pairs, with random weights; `data.train` is not read.

    Attributes:
        engine: DeepSpeed's engine around the towers.
        parameters: their number.
    """

    def __init__(
        self, config: Config, communicator: Communicator, lr: float = _LR, build: Build = build_objective
    ) -> None:
        engine_config = load_engine_config(config, communicator.world_size)
        self._config, self._communicator, self._lr = config, communicator, lr
        query = MemoryQuery(config, communicator.world_size)
        stand_in: Any = StandInTokenizer(config.model.text)
        self._size = query.source.preprocessing.size
        self._tokenizer: Any = query.tokenizer if config.model.pretrained or config.model.text.pretrained else stand_in
        torch.manual_seed(config.run.seed)
        model = query.source.build(self._tokenizer)
        self.parameters = parameter_count(model)
        if config.model.compile:
            model.compile_towers()
        self.engine = start_engine(model, config.optimizer, engine_config, communicator)
        context = Context(query.source.embed_dim, EPOCH * config.data.batch_size, communicator)
        objective = build(config, context, resolve_comm_dtype(config, engine_config))
        micro_batch = config.micro_batch(communicator.world_size)
        self._step = TrainStep(self.engine, objective, communicator, micro_batch, config.run.seed)

    def batch(self, number: int) -> Batch:
        """Return this rank's rows of a global batch of noise with distinct indices, a function of the step."""
        config, ranks, rank = self._config, self._communicator.world_size, self._communicator.rank
        generator = torch.Generator().manual_seed(number)
        index = torch.randperm(EPOCH * config.data.batch_size, generator=generator)[: config.data.batch_size]
        rows = config.rank_batch(ranks)
        generator.manual_seed(number * ranks + rank)
        image = torch.randint(0, 256, (rows, 3, self._size, self._size), generator=generator, dtype=torch.uint8)
        vocabulary = getattr(self._tokenizer, "vocab_size", _TOKENS)
        tokens = torch.randint(2, vocabulary, (rows, self._tokenizer.context_length), generator=generator)
        tokens[:, 0], tokens[:, -1] = 0, 1
        return Batch(image, tokens, index[rank * rows :][:rows], torch.ones(rows, dtype=torch.bool))

    def run(self, number: int, batch: Batch) -> FeatureGradients:
        """Run a step."""
        return self._step(batch, Step(number, number // EPOCH, self._lr, self._lr)).gradients


def run_synthetic_profile(
    config: Config, communicator: Communicator, folder: Path, name: str, build: Build = build_objective
) -> None:
    """Profile `run.profile_steps` steps after `run.profile_after` others, into `folder`, under `name` in its tables.

    Raises:
        UserError: the model is a pretrained one, or the config contradicts itself.
    """
    if config.model.pretrained:
        raise UserError("Random pairs need a new tokenizer: remove model.pretrained and set the towers' names instead.")
    steps = SyntheticSteps(config, communicator, build=build)
    engine_config = load_engine_config(config, communicator.world_size)
    facts = {
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
    after, count = config.run.profile_after, config.run.profile_steps
    with Recorder(folder, communicator, count, after, facts) as recorder:
        for number in range(after + count):
            batch = steps.batch(number)
            with recorder.step():
                steps.run(number, batch)
