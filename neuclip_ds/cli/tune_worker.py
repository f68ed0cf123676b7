"""`neuclip-ds tune-deepspeed`: one rank of one start of a variant."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

from neuclip_ds.checkpoint.engine_state import save_engine
from neuclip_ds.cli.tune_deepspeed import END, START, TIMES
from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.distributed.launch import connected
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.precision import resolve_comm_dtype
from neuclip_ds.engine.start import start_engine
from neuclip_ds.models.dual_encoder import build_dual_encoder
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.planning.dry_run import StandInTokenizer
from neuclip_ds.planning.synthetic_profile import random_batch
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.recipe import dump
from neuclip_ds.training.step import TrainStep

_WARM = 2  # steps that are not timed
_PROFILED = 2
_BATCHES = 100  # of the data set that indices are drawn from
_LR = 1e-4


class _Steps:
    """The steps of a start, on random pairs."""

    def __init__(self, config: Config, communicator: Communicator) -> None:
        engine_config = load_engine_config(config, communicator.world_size)
        torch.manual_seed(config.run.seed)
        stand_in: Any = StandInTokenizer(config.model.text)
        model = build_dual_encoder(config.model, stand_in)
        self.engine = start_engine(model, config.optimizer, engine_config, communicator)
        self._samples = _BATCHES * config.data.batch_size
        context = Context(config.model.embed_dim, self._samples, communicator)
        objective = build_objective(config, context, resolve_comm_dtype(config, engine_config))
        micro_batch = config.micro_batch(communicator.world_size)
        self._step = TrainStep(self.engine, objective, communicator, micro_batch, config.run.seed)
        self._config, self._communicator = config, communicator

    def run(self, number: int) -> float:
        """Run a step; return its seconds, without those of making its batch."""
        batch = random_batch(self._config, self._samples, self._communicator, number)
        self._communicator.barrier()
        began = time.perf_counter()
        self._step(batch, Step(number, 0, _LR, _LR))
        if self._communicator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def save(self, folder: Path) -> None:
        self._communicator.on_rank_zero(folder.mkdir)
        save_engine(folder, self.engine, self._communicator)


def measure_start(folder: Path, config: Config, timed: int) -> None:
    """Time steps; save the weights and a profile in the first round, the base's weights in the second as well."""
    first_round, base = folder.name == "0", folder.parent.name == "00"
    with connected(dump(config)) as communicator:
        steps = _Steps(config, communicator)
        if first_round and base:
            steps.save(folder / START)
        seconds = [steps.run(number) for number in range(_WARM + timed)][_WARM:]
        ranks = communicator.gather_objects((seconds, _peak_memory(communicator.device)))
        if communicator.rank == 0:
            slowest = [max(of_ranks) for of_ranks in zip(*(of_rank for of_rank, _ in ranks), strict=True)]
            times = {"seconds": slowest, "peak": max(peak for _, peak in ranks)}
            (folder / TIMES).write_text(json.dumps(times), encoding="utf-8")
        if first_round or (folder.name == "1" and base):
            steps.save(folder / END)
        if first_round:
            with Recorder(folder, communicator, _PROFILED, 1) as recorder:
                for number in range(_WARM + timed, _WARM + timed + _PROFILED + 1):
                    with recorder.step():
                        steps.run(number)


def _peak_memory(device: torch.device) -> int:
    """Return bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
