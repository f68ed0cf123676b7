"""Run one rank of this project for tools/benchmark_step.py: train.py, steps on random pairs, or only the loss.

With --objective, the program runs losses without towers (random features in, gradients out) and writes each method's
seconds per step on the slowest rank to OUT/seconds.json. On a CPU, it measures CPU time, so that there may be more
ranks than cores: CPU time excludes waiting for other ranks but includes the transport of features.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from benchmarking import program_parser, random_features
from benchmarking.launches import record_launches
from benchmarking.run_loss import build_loss
from benchmarking.synthetic_profile import EPOCH, SyntheticSteps, first_prediction

from neuclip_ds.cli.main import main as run_command
from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.config import Config, dump
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import process_group
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import deterministic_algorithms, resolve_comm_dtype
from neuclip_ds.losses.base import Position
from neuclip_ds.models.compilation import resolve_compilation
from neuclip_ds.recipe import load_recipe, validate
from neuclip_ds.reporting.metrics import MetricsLog

SECONDS = "seconds.json"


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--objective", nargs="+", default=[], help="methods whose objectives are measured")
    parser.add_argument("--repeats", type=int, default=2, help="number of timed steps of each objective (default: 2)")
    arguments = parser.parse_args()
    if arguments.objective:
        with exit_on_mistake():
            measure_losses(arguments)
    elif arguments.random:
        with exit_on_mistake():
            random_steps(arguments)
    else:
        folder_options = [f"--run.output_dir={arguments.out.parent}", f"--run.name={arguments.out.name}"]
        run_command(["train", str(arguments.config), *folder_options])


def random_steps(arguments: argparse.Namespace) -> None:
    """Run the steps of a run on random pairs, without loading data; then count the launches of one more step."""
    config = validate(load_recipe(str(arguments.config)))
    with process_group(dump(config)) as communicator, deterministic_algorithms(config.run.deterministic):
        steps = SyntheticSteps(config, communicator, config.optimizer.lr, caption_tokens=arguments.caption_tokens)
        gc.collect()
        gc.freeze()
        gc.disable()  # a run collects only every 100 steps
        last = config.max_steps or EPOCH
        with MetricsLog(arguments.out) if communicator.rank == 0 else nullcontext() as metrics:
            for number in range(1, 1 + last):
                outcome = steps.run(number - 1)
                if metrics is not None and number % config.run.log_every == 0:
                    metrics.write(number, {"loss": outcome.loss})
        stage = load_engine_config(config, communicator.world_size).zero_stage
        compiles = resolve_compilation(config.model.compile, communicator.device.type, stage) != "false"
        record_launches(lambda: steps.run(last), arguments.out, communicator.rank, compiles)


def measure_losses(arguments: argparse.Namespace) -> None:
    """Measure the loss of every method, and write the seconds on the slowest rank."""
    config = validate(load_recipe(str(arguments.config)))
    with process_group(dump(config)) as communicator, deterministic_algorithms(config.run.deterministic):
        slowest: dict[str, float] = {}
        for method in arguments.objective:
            config.objective.method = method
            seconds = loss_seconds(config, communicator, arguments.repeats)
            slowest[method] = max(communicator.gather_objects(seconds))
        if communicator.rank == 0:
            (arguments.out / SECONDS).write_text(json.dumps(slowest), encoding="utf-8")


def loss_seconds(config: Config, communicator: Communicator, repeats: int) -> float:
    """Return this rank's median seconds per step of the loss, once prototypes have been drawn or the queue is full."""
    dim = config.model.embed_dim
    comm_dtype = resolve_comm_dtype(config, load_engine_config(config, communicator.world_size))
    samples = EPOCH * config.data.batch_size
    loss = build_loss(config, dim, samples, communicator, comm_dtype, undo=False, reduction="sum")
    features = random_features(config.rank_batch(communicator.world_size), dim, communicator)
    on_gpu = communicator.device.type == "cuda"
    clock: Callable[[], float] = time.perf_counter if on_gpu else time.process_time
    untimed = max(2, first_prediction(config) + 1)
    seconds: list[float] = []
    for number in range(untimed + repeats):
        leaves = [features.image.detach().requires_grad_(), features.text.detach().requires_grad_()]
        position = Position(step=number, epoch=number // EPOCH, lr=1e-4, peak_lr=1e-4)
        communicator.barrier()
        start = clock()
        value = loss(*leaves, features.index, position=position)
        torch.autograd.grad(value, leaves)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(clock() - start)
    return statistics.median(seconds[untimed:])


if __name__ == "__main__":
    main()
