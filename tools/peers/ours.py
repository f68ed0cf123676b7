"""Run one rank of this project for tools/benchmark_step.py: train.py, steps on random pairs, or only the objective.

With --objective, the program runs objectives without towers (random features in, gradients out) and writes each
method's seconds on the slowest rank to OUT/seconds.json. On a CPU, it measures CPU time, so that there may be more
ranks than cores: CPU time excludes waiting for other ranks but includes the transport of features.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from benchmarking import program_parser, random_features
from benchmarking.synthetic_profile import EPOCH, SyntheticSteps, first_prediction
from neuclip_ds.objectives import build_objective

from neuclip_ds.cli.main import main as run_command
from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.config import Config, dump
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import process_group
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import deterministic_algorithms, resolve_comm_dtype
from neuclip_ds.losses.base import Context, Step
from neuclip_ds.recipe import load_recipe, validate
from neuclip_ds.reporting.metrics import MetricsLog

SECONDS = "seconds.json"


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--objective", nargs="+", default=[], help="methods whose objectives to measure")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of an objective")
    arguments = parser.parse_args()
    if arguments.objective:
        with exit_on_mistake():
            objectives(arguments)
    elif arguments.random:
        with exit_on_mistake():
            random_steps(arguments)
    else:
        folder = [f"--run.output_dir={arguments.out.parent}", f"--run.name={arguments.out.name}"]
        run_command(["train", str(arguments.config), *folder])


def random_steps(arguments: argparse.Namespace) -> None:
    """Run the steps of a run on one random batch, without loading data."""
    config = validate(load_recipe(str(arguments.config)))
    with process_group(dump(config)) as communicator, deterministic_algorithms(config.run.deterministic):
        steps = SyntheticSteps(config, communicator, config.optimizer.lr)
        batch = steps.batch(0)
        with MetricsLog(arguments.out) if communicator.rank == 0 else nullcontext() as metrics:
            for number in range(1, 1 + (config.max_steps or EPOCH)):
                gradients = steps.run(number - 1, batch)
                if metrics is not None and number % config.run.log_every == 0:
                    metrics.write(number, {"loss": float(gradients.loss)})


def objectives(arguments: argparse.Namespace) -> None:
    """Measure the objective of every method, and write the seconds on the slowest rank."""
    config = validate(load_recipe(str(arguments.config)))
    with process_group(dump(config)) as communicator, deterministic_algorithms(config.run.deterministic):
        slowest = {}
        for method in arguments.objective:
            config.objective.method = method
            seconds = objective_seconds(config, communicator, arguments.repeats)
            slowest[method] = max(communicator.gather_objects(seconds))
        if communicator.rank == 0:
            (arguments.out / SECONDS).write_text(json.dumps(slowest), encoding="utf-8")


def objective_seconds(config: Config, communicator: Communicator, repeats: int) -> float:
    """Return this rank's median seconds per step of the objective, once NeuCLIP's network predicts."""
    dim = config.model.embed_dim
    comm_dtype = resolve_comm_dtype(config, load_engine_config(config, communicator.world_size))
    objective = build_objective(config, Context(dim, EPOCH * config.data.batch_size, communicator), comm_dtype)
    features = random_features(config.rank_batch(communicator.world_size), dim, communicator)
    on_gpu = communicator.device.type == "cuda"
    now: Callable[[], float] = time.perf_counter if on_gpu else time.process_time
    warm_up = max(2, first_prediction(config) + 1)
    seconds = []
    for number in range(warm_up + repeats):
        communicator.barrier()
        began = now()
        objective(features, Step(number, number // EPOCH, 1e-4, 1e-4))
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(now() - began)
    return statistics.median(seconds[warm_up:])


if __name__ == "__main__":
    main()
