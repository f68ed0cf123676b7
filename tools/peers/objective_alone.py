"""One rank's share of the objective, without towers, for tools/benchmark_step.py: random features in, gradients out.

On a CPU the time is that of the processor, so that more ranks than cores can be measured: waiting for other ranks is
not in it, the transport of features is. NeuCLIP's network is measured once it predicts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import normalize

from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import connected
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.objectives import build_objective, find_method
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.methods.neuclip import NpnConfig
from neuclip_ds.recipe import dump, load_recipe, validate

SECONDS = "seconds.json"
_EPOCH = 100  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a run's config")
    parser.add_argument("out", type=Path, help="folder for seconds.json: method -> seconds of the slowest rank")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    arguments = parser.parse_args()
    config = validate(load_recipe(str(arguments.config)))
    exit_on_mistake(lambda: measure(config, arguments))


def measure(config: Config, arguments: argparse.Namespace) -> None:
    with connected(dump(config)) as communicator:
        found = {}
        for method in arguments.methods:
            config.objective.method = method
            found[method] = max(communicator.gather_objects(seconds_of(config, communicator, arguments.repeats)))
        if communicator.rank == 0:
            (arguments.out / SECONDS).write_text(json.dumps(found), encoding="utf-8")


def seconds_of(config: Config, communicator: Communicator, repeats: int) -> float:
    """Median over steps of this rank's time."""
    batch, dim = config.data.batch_size, config.model.embed_dim
    comm_dtype = resolve_comm_dtype(config, load_engine_config(config, communicator.world_size))
    context = Context(dim, _EPOCH * batch, communicator)
    objective = build_objective(config, context, comm_dtype)
    features = random_features(config.rank_batch(communicator.world_size), dim, communicator)
    before = steps_before_prediction(config)
    seconds = [timed(objective, features, number, communicator) for number in range(before + repeats)]
    return statistics.median(seconds[before:])


def steps_before_prediction(config: Config) -> int:
    """Steps after which every part of an objective does what it will do for the rest of the run."""
    uses_network = "npn" in find_method(config.objective.method).sections
    return 2 + (
        math.ceil(config.objective.section(NpnConfig).prototypes / config.data.batch_size) if uses_network else 0
    )


def random_features(rows: int, dim: int, communicator: Communicator) -> Features:
    generator = torch.Generator().manual_seed(communicator.rank)
    image, text = (normalize(torch.randn(rows, dim, generator=generator), dim=1) for _ in range(2))
    index = torch.arange(rows) + communicator.rank * rows
    device = communicator.device
    valid = torch.ones(rows, dtype=torch.bool, device=device)
    return Features(image.to(device), text.to(device), index.to(device), valid)


def timed(objective: Objective, features: Features, number: int, communicator: Communicator) -> float:
    """Seconds of one step."""
    on_gpu = communicator.device.type == "cuda"
    now: Callable[[], float] = time.perf_counter if on_gpu else time.process_time
    communicator.barrier()
    began = now()
    objective(features, Step(number, number // _EPOCH, 1e-4, 1e-4))
    if on_gpu:
        torch.cuda.synchronize()
    return now() - began


if __name__ == "__main__":
    main()
