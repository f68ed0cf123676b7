"""`neuclip-ds tune-deepspeed`: one rank of one start of a variant."""

import json
import resource
import time
from pathlib import Path

import torch

from neuclip_ds.checkpoint.engine_state import save_engine
from neuclip_ds.cli.tune_deepspeed import END, START, TIMES
from neuclip_ds.config import Config
from neuclip_ds.distributed.launch import connected
from neuclip_ds.engine.deterministic import deterministic_algorithms
from neuclip_ds.planning.synthetic_profile import SyntheticSteps
from neuclip_ds.profiling.recorder import Recorder
from neuclip_ds.recipe import dump

_WARM = 2  # steps that are not timed
_PROFILED = 2


def measure_start(folder: Path, config: Config, timed: int) -> None:
    """Time steps; save the weights and a profile in the first round, the base's weights in the second as well."""
    first_round, base = folder.name == "0", folder.parent.name == "00"
    with connected(dump(config), folder) as communicator, deterministic_algorithms(config.run.deterministic):
        steps, on_gpu = SyntheticSteps(config, communicator), communicator.device.type == "cuda"

        def save(name: str) -> None:
            communicator.on_rank_zero((folder / name).mkdir)
            save_engine(folder / name, steps.engine, communicator)

        def run(number: int) -> float:
            """Run a step; return its seconds, without those of making its batch."""
            batch = steps.batch(number)
            communicator.barrier()
            began = time.perf_counter()
            steps.run(number, batch)
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        if first_round and base:
            save(START)
        seconds = [run(number) for number in range(_WARM + timed)][_WARM:]
        # bytes of tensors on a GPU, of the whole process on a CPU
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = torch.cuda.max_memory_allocated() if on_gpu else resident
        ranks = communicator.gather_objects((seconds, peak))
        if communicator.rank == 0:
            slowest = [max(of_ranks) for of_ranks in zip(*(of_rank for of_rank, _ in ranks), strict=True)]
            times = {"seconds": slowest, "peak": max(of_rank[1] for of_rank in ranks)}
            (folder / TIMES).write_text(json.dumps(times), encoding="utf-8")
        if first_round or (folder.name == "1" and base):
            save(END)
        if first_round:
            with Recorder(folder, communicator, _PROFILED, 1) as recorder:
                for number in range(_WARM + timed, _WARM + timed + _PROFILED + 1):
                    with recorder.step():
                        run(number)
