"""For developers of neuclip_ds: compare the peak memory of training steps with the prediction of `--dry-run`.

Every case runs a few training steps on random pixels in fresh processes, one per rank. On a CPU, the measurement is the
highest resident memory of a rank during the steps (VmHWM, reset before the first step) minus the resident memory before
the model is built, when all libraries are loaded; freed blocks return to the system at once. On a GPU, the measurement
is torch.cuda.max_memory_allocated. The table also shows samples/s and, with --tflops, the share of the peak FLOP/s.

Examples:
    python tools/benchmark_memory.py --engines zero1_bf16 zero3_bf16 --ranks 1 2 --micro 16 --passes 1 2
    python tools/benchmark_memory.py --models vith14 --micro 32 64 128 --checkpointing on --tflops 989
"""

import argparse
import itertools
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from benchmarking import on_ranks, reset_peak, resident
from benchmarking.synthetic_profile import EPOCH, SyntheticSteps
from step_costs import count_flops
from torch.multiprocessing import ProcessRaisedException

from neuclip_ds.config import Config, dump
from neuclip_ds.distributed.launch import process_group
from neuclip_ds.planning.memory import MemoryQuery, account, count_towers
from neuclip_ds.recipe import load_recipe, override, validate

_MODELS = {"vitb32": "models/vitb32", "vitb16": "models/vitb16", "rn50": "models/rn50", "vith14": "models/dfn5b_vith14"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case to measure: one row of the table."""

    model: str
    engine: str
    ranks: int
    micro: int
    passes: int  # micro-batches per step
    checkpointing: bool
    method: str

    def config(self) -> Config:
        options = {
            "data": {"batch_size": self.ranks * self.micro * self.passes, "micro_batch": self.micro},
            "model": {"activation_checkpointing": self.checkpointing},
            "objective": {"method": self.method},
            "optimizer": {"name": "adamw", "lr": 1e-5},
            "deepspeed": self.engine,
        }
        return validate(override(load_recipe(_MODELS[self.model]), options))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One rank's measured and predicted memory, time and FLOPs."""

    measured: int  # bytes
    predicted: int  # bytes
    components: list[str]  # lines with the components of the prediction
    seconds: float  # fastest step after the first
    flops: float  # of a step


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Return one rank's `Measurement`."""
    config = case.config()
    with process_group(dump(config)) as communicator:
        on_gpu = communicator.device.type == "cuda"
        query = MemoryQuery(config, case.ranks, EPOCH * config.data.batch_size, communicator.device.type)
        estimate = account(query, count_towers(query))
        before = resident("VmRSS")
        run = SyntheticSteps(config, communicator, lr=1e-6, batches=1)
        reset_peak()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for number in range(steps):
            start = time.perf_counter()
            run.run(number)
            seconds.append(time.perf_counter() - start)
        if on_gpu:
            measured = torch.cuda.max_memory_allocated()
            predicted = estimate.peak
        else:
            measured = resident("VmHWM") - before
            predicted = estimate.peak + estimate.on_host
        flops_per_pair = sum(tower.forward + tower.backward for tower in count_flops(query))
        measurement = Measurement(
            measured=measured,
            predicted=predicted,
            components=estimate.lines(),
            seconds=min(seconds[1:]),
            flops=flops_per_pair * config.rank_batch(case.ranks),
        )
        return asdict(measurement)


def line(case: Case, by_rank: list[Measurement], tflops: float | None) -> str:
    """Return a row of the table, from the memory of the rank with the largest peak and the time of the slowest rank."""
    worst = max(by_rank, key=lambda measurement: measurement.measured)
    seconds = max(measurement.seconds for measurement in by_rank)
    ratio = worst.predicted / worst.measured
    fraction = f"{worst.flops / seconds / tflops / 1e12:.2f}" if tflops else "-"
    pairs = case.ranks * case.micro * case.passes
    return (
        f"| {case.model} | {case.engine} | {case.ranks} | {case.passes} x {case.micro} | "
        f"{'yes' if case.checkpointing else 'no'} | {worst.predicted / 1e6:,.0f} | {worst.measured / 1e6:,.0f} | "
        f"{ratio:.2f} | {pairs / seconds:,.1f} | {fraction} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=_MODELS, default=["vitb32"], help="models to train (default: vitb32)"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["zero1_bf16"],
        help="DeepSpeed configs: names in ds_configs/ or JSON files (default: zero1_bf16)",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1], help="numbers of ranks on this machine (default: 1)"
    )
    parser.add_argument(
        "--micro", type=int, nargs="+", default=[32], help="pairs per micro-batch and rank (default: 32)"
    )
    parser.add_argument(
        "--passes", type=int, nargs="+", default=[1], help="micro-batches per step and rank (default: 1)"
    )
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        choices=["on", "off"],
        default=["off"],
        help="activation checkpointing (default: off)",
    )
    parser.add_argument("--method", default="fastclip_v3", help="method to train with (default: fastclip_v3)")
    parser.add_argument("--steps", type=int, default=3, help="number of training steps, at least 2 (default: 3)")
    parser.add_argument(
        "--tflops",
        type=float,
        help="peak TFLOP/s of the GPU in the precision of --engines; if set, prints the model FLOPs utilization",
    )
    parser.add_argument("--parts", action="store_true", help="also print the components of the prediction")
    options = parser.parse_args()
    # freed blocks return to the system at once, so that resident memory counts only live blocks
    os.environ.update(MALLOC_MMAP_THRESHOLD_="1000000", MALLOC_TRIM_THRESHOLD_="0", MALLOC_ARENA_MAX="1")
    names = "model, engine, ranks, batch of a rank, checkpointing, predicted MB, measured MB, ratio, samples/s"
    print(f"| {names.replace(', ', ' | ')} | share of peak FLOP/s |")
    print("|---" * 10 + "|")
    combinations = itertools.product(
        options.models, options.engines, options.ranks, options.micro, options.passes, options.checkpointing
    )
    for model, engine, ranks, micro, passes, checkpointing in combinations:
        case = Case(
            model=model,
            engine=engine,
            ranks=ranks,
            micro=micro,
            passes=passes,
            checkpointing=checkpointing == "on",
            method=options.method,
        )
        try:
            results = on_ranks(case.ranks, measure, case, options.steps)
        except ProcessRaisedException as error:
            if "out of memory" not in str(error):
                raise
            print(f"| {case.model} | {case.engine} | {case.ranks} | {case.passes} x {case.micro} | out of memory |")
            continue
        by_rank = [Measurement(**result) for result in results]
        print(line(case, by_rank, options.tflops), flush=True)
        if options.parts:
            print("\n".join(by_rank[0].components))


if __name__ == "__main__":
    main()
