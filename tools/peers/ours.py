"""One rank of this project's training for tools/benchmark_step.py: train.py itself, or steps on random pairs."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from neuclip_ds.cli.main import main as run_command
from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.config import Config
from neuclip_ds.distributed.launch import connected
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.dual_encoder import DualEncoder, build_dual_encoder
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.planning.dry_run import StandInTokenizer
from neuclip_ds.planning.synthetic_profile import random_batch
from neuclip_ds.recipe import dump, load_recipe, validate
from neuclip_ds.reporting.metrics import MetricsLog
from neuclip_ds.training.step import TrainStep

_EPOCH = 100  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a run's config")
    parser.add_argument("out", type=Path, help="its folder")
    parser.add_argument("--random", action="store_true", help="one batch of random pairs again and again")
    arguments = parser.parse_args()
    if arguments.random:
        exit_on_mistake(lambda: random_steps(arguments))
        return
    run_command(
        ["train", str(arguments.config), f"--run.folder={arguments.out.parent}", f"--run.name={arguments.out.name}"]
    )


def random_steps(arguments: argparse.Namespace) -> None:
    """The steps of a run on one random batch, which leaves loading out."""
    config = validate(load_recipe(str(arguments.config)))
    with connected(dump(config)) as communicator:
        engine_config = load_engine_config(config, communicator.world_size)
        engine = start_engine(build_towers(config), config.optimizer, engine_config, communicator)
        samples = _EPOCH * config.data.batch_size
        context = Context(config.model.embed_dim, samples, communicator)
        objective = build_objective(config, context, resolve_comm_dtype(config, engine_config))
        step = TrainStep(engine, objective, communicator, config.micro_batch(communicator.world_size), config.run.seed)
        batch, lr = random_batch(config, samples, communicator, 0), config.optimizer.lr
        with MetricsLog(arguments.out) if communicator.rank == 0 else nullcontext() as metrics:
            for number in range(config.budget.steps or _EPOCH):
                gradients = step(batch, Step(number, number // _EPOCH, lr, lr))
                if metrics is not None and (number + 1) % config.run.log_every == 0:
                    metrics.write(number + 1, {"loss": float(gradients.loss)})


def build_towers(config: Config) -> DualEncoder:
    """With random weights, for tokens of a tokenizer that is never made."""
    torch.manual_seed(config.run.seed)
    stand_in: Any = StandInTokenizer(config.model.text)
    model = build_dual_encoder(config.model, stand_in)
    if config.model.compile:
        model.compile_towers()
    return model


if __name__ == "__main__":
    main()
