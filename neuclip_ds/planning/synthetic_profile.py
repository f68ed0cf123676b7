"""The synthetic profile: training steps on random pairs, to measure a configuration without data.

Everything from the towers on is that of a run; there is no loader, so a step does not include its time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import is_bf16, load_engine_config, zero_stage
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import UserError
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder, parameter_count
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.planning.dry_run import StandInTokenizer
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.recipe import dump
from neuclip_ds.training.step import TrainStep

Build = Callable[[Config, Context, torch.dtype], Objective]
CONFIG = "config.yaml"  # next to the breakdown
_BATCHES = 100  # of the data set that the indices are drawn from
_LR = 1e-4


def run_synthetic_profile(
    config: Config, communicator: Communicator, folder: Path, name: str, build: Build = build_objective
) -> None:
    """Profile `run.profile_steps` steps after `run.profile_after` others, into `folder`.

    Args:
        config: of the run; `data.train` is not read.
        communicator: its ranks.
        folder: as for `Recorder`.
        name: of the objective, in tables.
        build: the objective.

    Raises:
        UserError: the model is a pretrained one, or the config contradicts itself.
    """
    if config.model.pretrained:
        raise UserError("Random pairs need a new tokenizer: remove model.pretrained and set the towers' names instead.")
    engine_config = load_engine_config(config, communicator.world_size)
    torch.manual_seed(config.run.seed)
    stand_in: Any = StandInTokenizer(config.model.text)
    model = build_dual_encoder(config.model, stand_in)
    facts = {
        "method": name,
        "zero_stage": zero_stage(engine_config),
        "precision": "bf16" if is_bf16(engine_config) else "float32",
        "batch_size": config.data.batch_size,
        "embed_dim": config.model.embed_dim,
        "parameters": parameter_count(model),
    }
    step = _build_step(config, model, engine_config, communicator, build)
    if communicator.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(dump(config), encoding="utf-8")
    after, steps = config.run.profile_after, config.run.profile_steps
    with Recorder(folder, communicator, steps, after, facts) as recorder:
        for number in range(after + steps):
            batch = random_batch(config, _samples(config), communicator, number)
            with recorder.step():
                step(batch, Step(number, number // _BATCHES, _LR, _LR))


def _build_step(
    config: Config, model: DualEncoder, engine_config: dict[str, Any], communicator: Communicator, build: Build
) -> TrainStep:
    if config.model.compile:
        model.compile_towers()
    engine = start_engine(model, config.optimizer, engine_config, communicator)
    context = Context(config.model.embed_dim, _samples(config), communicator)
    objective = build(config, context, resolve_comm_dtype(config, engine_config))
    return TrainStep(engine, objective, communicator, config.micro_batch(communicator.world_size), config.run.seed)


def _samples(config: Config) -> int:
    return _BATCHES * config.data.batch_size


def random_batch(config: Config, samples: int, communicator: Communicator, number: int) -> Batch:
    """Return this rank's rows of a global batch of noise with distinct indices, a function of the step."""
    generator = torch.Generator().manual_seed(number)
    index = torch.randperm(samples, generator=generator)[: config.data.batch_size]
    rows = config.rank_batch(communicator.world_size)
    generator.manual_seed(number * communicator.world_size + communicator.rank)
    size, text = config.model.vision.image_size, config.model.text
    image = torch.randint(0, 256, (rows, 3, size, size), generator=generator, dtype=torch.uint8)
    tokens = torch.randint(2, text.vocab_size, (rows, text.context_length), generator=generator)
    tokens[:, 0], tokens[:, -1] = 0, 1
    local = index[communicator.rank * rows :][:rows]
    return Batch(image, tokens, local, torch.ones(rows, dtype=torch.bool))
