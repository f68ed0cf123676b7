"""Measures bucket, overlap and precision settings of a DeepSpeed config on this machine, and chooses the best.

Each variant of the base changes one setting and trains on random pairs (no loading) in fresh processes, one a rank; the
variants take turns over several rounds, so that a machine that slows down slows all of them. What is better beyond the
spread of the rounds is then measured together against the base, in rounds of its own. OUT gets tuning.md, tuning.html
and tuning.json: time, calls and bytes of the engine's collectives (profiled after the timed steps), how far the weights
are from the base's after the same steps (of the base: from its own second start), and memory. A variant that DeepSpeed
refuses is a row with its words. docs/zero_settings.md says which settings there are.

Options of the run, such as --model.embed_dim=512, are passed on.

Example: python tools/tune_engine.py --engine zero2_bf16 --ranks 2 --recipe miniature --rows 16 --steps 10 --rounds 3
             --out runs/tuning --write mine.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neuclip_ds.checkpoint.sharded_state import WEIGHT, StateFiles
from neuclip_ds.cli import exit_on_mistake
from neuclip_ds.config import Config
from neuclip_ds.engine.config import load_engine_config, read_engine_file
from neuclip_ds.errors import UserError
from neuclip_ds.planning.engine_tuning import (
    Measurement,
    apply_overrides,
    best_together,
    choose,
    parse_override,
    reason,
    table,
    variants,
)
from neuclip_ds.profiling.recorder import BREAKDOWN
from neuclip_ds.recipe import dump, parse
from neuclip_ds.reporting.page import write_page

_WARM = 2  # steps of a start that are not timed
_PROFILED = 2
_BATCHES = 100  # of the data set that indices are drawn from
_LR = 1e-4
_TIMES, _START, _END = "times.json", "start", "end"  # what a start leaves in its folder


class Plan(NamedTuple):
    """What is the same for all variants."""

    base: dict[str, Any]
    arguments: argparse.Namespace
    overrides: Sequence[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="zero1_bf16", help="the base: a name in ds_configs/ or a JSON (zero1_bf16)")
    parser.add_argument("--variants", nargs="+", metavar="KEY=VALUE", help="instead of those of the base's stage")
    parser.add_argument("--ranks", type=int, default=2, help="on this machine (2)")
    parser.add_argument("--recipe", default="demo", help="that model and objective are taken from (demo)")
    parser.add_argument("--rows", type=int, default=32, help="pairs a rank (32)")
    parser.add_argument("--steps", type=int, default=10, help="that are timed at each start (10)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each variant (3); with one nothing is better")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a start may take (600)")
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"))
    parser.add_argument("--write", type=Path, help="file for the base with the settings that are better")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a start
    arguments, overrides = parser.parse_known_args()
    exit_on_mistake(lambda: (work if arguments.worker else tune)(arguments, overrides))


def tune(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Measures all variants, then the best together, and writes both tables and the choice."""
    config = run_config(arguments, overrides)
    if config.model.pretrained:
        raise UserError("Random pairs have no pretrained tokenizer: leave model.pretrained empty and name the towers.")
    load_engine_config(config, arguments.ranks)  # a mistake shows before any process starts
    plan = Plan(read_engine_file(config.deepspeed)[1], arguments, overrides)
    single = list(map(parse_override, arguments.variants)) if arguments.variants else variants(plan.base)
    if not single:
        raise UserError(f"DeepSpeed has no setting to try for {config.deepspeed}; name some with --variants.")
    alone = [Measurement(()), *(Measurement((one,)) for one in single)]
    measure(alone, plan, arguments.out / "alone")
    base = alone[0]
    tables, found = [table(alone, base, f"Each setting alone, against {config.deepspeed}")], {"alone": alone}
    chosen = base
    settings = best_together(alone, base)
    if settings:
        candidates = [settings, *([choose(alone, base).overrides] if len(settings) > 1 else [])]
        together = [Measurement(()), *map(Measurement, candidates)]
        measure(together, plan, arguments.out / "together")
        chosen = choose(together[1:], together[0])
        tables.append(table(together, together[0], "Those that are better, together and again"))
        found["together"] = together
    write_page(tables, [], arguments.out / "tuning", f"Settings of {config.deepspeed}")
    said = {part: [{**asdict(one), "name": one.name} for one in ones] for part, ones in found.items()}
    summary = {"engine": config.deepspeed, "ranks": arguments.ranks, "chosen": chosen.name, **said}
    (arguments.out / "tuning.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print((arguments.out / "tuning.md").read_text(encoding="utf-8"))
    print(f"Better than the base beyond the spread: {chosen.name if chosen.overrides else 'nothing'}.")
    if arguments.write:
        written = apply_overrides(plan.base, chosen.overrides)
        arguments.write.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def run_config(arguments: argparse.Namespace, overrides: Sequence[str]) -> Config:
    ours = [f"--data.batch_size={arguments.rows * arguments.ranks}", f"--deepspeed={arguments.engine}"]
    return parse([arguments.recipe, *ours, *overrides]).config


def measure(found: Sequence[Measurement], plan: Plan, folder: Path) -> None:
    """Fills in the measurements, the first of which is the base; all take their turn in every round.

    Raises:
        UserError: the base itself fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(plan.arguments.rounds):
        for place, one in enumerate(found):
            if one.error is None:
                start(one, number, folder / f"{place:02d}", plan)
                said = one.error or f"{1e3 * one.medians[-1]:.1f} ms a step"
                print(f"round {number + 1}, {one.name}: {said}", flush=True)
            if found[0].error:
                raise UserError(f"The base fails ({found[0].error}); see {folder}/00.")
            if one.error is None and (number == 0 or (number == 1 and place == 0)):
                compare(one, folder / f"{place:02d}" / str(number), folder / "00" / "0")
    for weights in [*folder.glob(f"*/*/{_START}"), *folder.glob(f"*/*/{_END}")]:
        shutil.rmtree(weights)


def start(one: Measurement, number: int, parent: Path, plan: Plan) -> None:
    """One start of a variant, in processes of its own."""
    folder = parent / str(number)
    folder.mkdir(parents=True)
    (parent / "engine.json").write_text(json.dumps(apply_overrides(plan.base, one.overrides)), encoding="utf-8")
    asked = plan.arguments
    own = [f"--worker={folder}", f"--engine={parent}/engine.json", f"--recipe={asked.recipe}", f"--rows={asked.rows}"]
    own += [f"--ranks={asked.ranks}", f"--steps={asked.steps}", *plan.overrides]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // asked.ranks))
    shared = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    shared |= {"WORLD_SIZE": str(asked.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in range(asked.ranks):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"output_{rank}.txt").open("w") as output:
            command = [sys.executable, __file__, *own]
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    one.error = ended(ranks, time.monotonic() + asked.limit, folder)
    if one.error is None:
        times = json.loads((folder / _TIMES).read_text(encoding="utf-8"))
        one.rounds.append(times["seconds"])
        one.peak = max(one.peak, times["peak"])
        if number == 0:
            one.traffic = json.loads((folder / BREAKDOWN).read_text(encoding="utf-8"))["purposes"]


def ended(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, folder: Path) -> str | None:
    """Waits for all ranks; why they failed, if one did."""
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
    except subprocess.TimeoutExpired:
        return f"no end within --limit; see {folder}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    outputs = [(folder / f"output_{rank}.txt").read_text(encoding="utf-8") for rank, code in enumerate(codes) if code]
    said = [reason(output) for output in outputs]
    # the rank that failed first knows why, the others only that it did
    return max(said, key=lambda words: "Error" in words) if said else None


def compare(one: Measurement, folder: Path, base: Path) -> None:
    """The weights at the end beside the base's."""
    own, theirs, before = StateFiles(folder / _END), StateFiles(base / _END), StateFiles(base / _START)
    largest = apart = way = 0.0
    for name in theirs.names():
        weight = theirs.read(name, WEIGHT).double()
        change = own.read(name, WEIGHT).double() - weight
        largest = max(largest, float(change.abs().max()))
        apart += float(change.square().sum())
        way += float((weight - before.read(name, WEIGHT).double()).square().sum())
    one.difference, one.drift = largest, (apart / way) ** 0.5 if way else None


def work(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """One rank of a start: timed steps, then, in the first round, weights and a profile."""
    from neuclip_ds.checkpoint.engine_state import save_engine
    from neuclip_ds.distributed.launch import connected
    from neuclip_ds.engine.precision import resolve_comm_dtype
    from neuclip_ds.engine.start import start_engine
    from neuclip_ds.models.dual_encoder import build_dual_encoder
    from neuclip_ds.objectives import build_objective
    from neuclip_ds.objectives.base import Context, Step
    from neuclip_ds.planning.dry_run import StandInTokenizer
    from neuclip_ds.planning.synthetic_profile import random_batch
    from neuclip_ds.profiling.recorder import Recorder
    from neuclip_ds.training.step import TrainStep

    folder, config = arguments.worker, run_config(arguments, overrides)
    with connected(dump(config)) as communicator:
        engine_config = load_engine_config(config, communicator.world_size)
        torch.manual_seed(config.run.seed)
        stand_in: Any = StandInTokenizer(config.model.text)
        model = build_dual_encoder(config.model, stand_in)
        engine = start_engine(model, config.optimizer, engine_config, communicator)
        samples = _BATCHES * config.data.batch_size
        context = Context(config.model.embed_dim, samples, communicator)
        objective = build_objective(config, context, resolve_comm_dtype(config, engine_config))
        step = TrainStep(engine, objective, communicator, config.micro_batch(communicator.world_size), config.run.seed)

        def run_step(number: int) -> float:
            """Its seconds, the making of its batch left out."""
            batch = random_batch(config, samples, communicator, number)
            communicator.barrier()
            began = time.perf_counter()
            step(batch, Step(number, 0, _LR, _LR))
            if communicator.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        def save(name: str) -> None:
            communicator.on_rank_zero((folder / name).mkdir)
            save_engine(folder / name, engine, communicator)

        if folder.name == "0" and folder.parent.name == "00":
            save(_START)
        seconds = [run_step(number) for number in range(_WARM + arguments.steps)][_WARM:]
        ranks = communicator.gather_objects((seconds, peak_memory(communicator.device)))
        if communicator.rank == 0:
            slowest = [max(of_ranks) for of_ranks in zip(*(own for own, _ in ranks), strict=True)]
            times = {"seconds": slowest, "peak": max(peak for _, peak in ranks)}
            (folder / _TIMES).write_text(json.dumps(times), encoding="utf-8")
        if folder.name == "0" or (folder.name == "1" and folder.parent.name == "00"):
            save(_END)
        if folder.name == "0":
            with Recorder(folder, communicator, _PROFILED, 1) as recorder:
                for number in range(_WARM + arguments.steps, _WARM + arguments.steps + _PROFILED + 1):
                    with recorder.step():
                        run_step(number)


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU of tensors, on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
