"""Measure bucket, overlap and precision settings of a DeepSpeed config on this machine, and choose the best.

Each variant changes one setting of the base and trains on random pairs (no loading) in fresh processes, one per rank;
the variants take turns over several rounds, so that a machine that slows down slows all of them. Settings that are
better beyond the spread of the rounds are then measured together against the base, in separate rounds. OUT receives
tuning.md, tuning.html and tuning.json: time, calls and bytes of the engine's collectives (profiled after the timed
steps), how far the weights are from the base's after the same steps (for the base: from its own second start), and
memory. A variant that DeepSpeed refuses is a row with its message. docs/reference/zero_settings.md lists the settings.

Options of the run, such as --model.embed-dim=512, are passed on.

Example:
  neuclip-ds tune-deepspeed --engine zero2_bf16 --ranks 2 --recipe miniature --rows 16 --steps 10 --rounds 3 \\
    --out runs/tuning --write mine.json
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from neuclip_ds.cli.program import Parser
from neuclip_ds.config import Config
from neuclip_ds.data.children import killed_with_parent
from neuclip_ds.engine.config import load_engine_config, read_engine_file
from neuclip_ds.errors import UserError
from neuclip_ds.planning import engine_tuning as tuning
from neuclip_ds.planning.engine_tuning import Measurement, apply_overrides
from neuclip_ds.recipe import parse
from neuclip_ds.reporting.page import write_page

TIMES, START, END = "times.json", "start", "end"  # what a start leaves in its folder


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds tune-deepspeed", description=__doc__)
    parser.add_argument("--engine", default="zero1_bf16", help="the base: a name in ds_configs/ or a JSON file")
    parser.add_argument("--variants", nargs="+", metavar="KEY=VALUE", help="settings (default: those of the stage)")
    parser.add_argument("--ranks", type=int, default=2, help="on this machine")
    parser.add_argument("--recipe", default="demo", help="recipe of model and objective")
    parser.add_argument("--rows", type=int, default=32, help="pairs per rank")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per start")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each variant; one round shows no spread")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a start may take")
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"), help="folder for the results")
    parser.add_argument("--write", type=Path, help="JSON file to write: the base with the better settings")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a start
    options, overrides = parser.parse_with_overrides(arguments)
    options.overrides = overrides
    if options.worker:
        from neuclip_ds.cli.tune_worker import measure_start

        measure_start(options.worker, run_config(options), options.steps)
    else:
        tune(options)


def tune(arguments: argparse.Namespace) -> None:
    """Measure all variants, then the best together, and write both tables and the choice."""
    config = run_config(arguments)
    if config.model.pretrained:
        raise UserError("Random pairs have no pretrained tokenizer: omit model.pretrained and name the towers.")
    load_engine_config(config, arguments.ranks)  # refuses a wrong config before any process starts
    arguments.base = read_engine_file(config.deepspeed)[1]
    single = [tuning.parse_override(text) for text in arguments.variants or ()] or tuning.variants(arguments.base)
    if not single:
        raise UserError(f"DeepSpeed has no setting to try for {config.deepspeed}; name some with --variants.")
    alone = [Measurement(()), *(Measurement((setting,)) for setting in single)]
    measure(alone, arguments, arguments.out / "alone")
    base = alone[0]
    tables, found = [tuning.table(alone, base, f"Each setting alone, against {config.deepspeed}")], {"alone": alone}
    chosen = base
    settings = tuning.best_together(alone, base)
    if settings:
        candidates = [settings, *([tuning.choose(alone, base).overrides] if len(settings) > 1 else [])]
        together = [Measurement(()), *map(Measurement, candidates)]
        measure(together, arguments, arguments.out / "together")
        chosen = tuning.choose(together[1:], together[0])
        tables.append(tuning.table(together, together[0], "The better settings together, measured again"))
        found["together"] = together
    text = write_page(tables, {}, arguments.out / "tuning", f"Settings of {config.deepspeed}")
    rows = {part: [{**asdict(one), "name": one.name} for one in ones] for part, ones in found.items()}
    summary = {"engine": config.deepspeed, "ranks": arguments.ranks, "chosen": chosen.name, **rows}
    (arguments.out / "tuning.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print(text)
    print(f"Better than the base beyond the spread: {chosen.name if chosen.overrides else 'nothing'}.")
    if arguments.write:
        written = apply_overrides(arguments.base, chosen.overrides)
        arguments.write.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def run_config(arguments: argparse.Namespace) -> Config:
    """Return the config of every start."""
    ours = [f"--data.batch_size={arguments.rows * arguments.ranks}", f"--deepspeed={arguments.engine}"]
    return parse([arguments.recipe, *ours, *arguments.overrides]).config


def measure(found: Sequence[Measurement], arguments: argparse.Namespace, folder: Path) -> None:
    """Fill in the measurements, the first of which is the base; all take their turn in every round.

    Raises:
        UserError: the base itself fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(arguments.rounds):
        for place, one in enumerate(found):
            if one.error is None:
                start(one, number, folder / f"{place:02d}", arguments)
                outcome = one.error or f"{1e3 * one.medians[-1]:.1f} ms a step"
                print(f"round {number + 1}, {one.name}: {outcome}", flush=True)
            if found[0].error:
                raise UserError(f"The base fails ({found[0].error}); see {folder}/00.")
            if one.error is None and (number == 0 or (number == 1 and place == 0)):
                compare(one, folder / f"{place:02d}" / str(number), folder / "00" / "0")
    for weights in [*folder.glob(f"*/*/{START}"), *folder.glob(f"*/*/{END}")]:
        shutil.rmtree(weights)


def start(one: Measurement, number: int, parent: Path, arguments: argparse.Namespace) -> None:
    """Start a variant once, in fresh processes, and add what it measures."""
    from neuclip_ds.profiling.recorder import BREAKDOWN  # torch takes seconds to import

    folder = parent / str(number)
    folder.mkdir(parents=True)
    (parent / "engine.json").write_text(json.dumps(apply_overrides(arguments.base, one.overrides)), encoding="utf-8")
    own = [f"--worker={folder}", f"--engine={parent}/engine.json", *arguments.overrides]
    own += [f"--{name}={getattr(arguments, name)}" for name in ("recipe", "rows", "ranks", "steps")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.ranks))}
    ranks = []
    for rank in range(arguments.ranks):
        environment = {**threads, **os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"output_{rank}.txt").open("w") as output:
            command = [sys.executable, "-m", "neuclip_ds", "tune-deepspeed", *own]
            ranks.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=killed_with_parent(),
                )
            )
    one.error = ended(ranks, time.monotonic() + arguments.limit, folder)
    if one.error is None:
        times = json.loads((folder / TIMES).read_text(encoding="utf-8"))
        one.rounds.append(times["seconds"])
        one.peak = max(one.peak, times["peak"])
        if number == 0:
            one.traffic = json.loads((folder / BREAKDOWN).read_text(encoding="utf-8"))["purposes"]


def ended(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, folder: Path) -> str | None:
    """Wait for all ranks; return why they failed, if one did."""
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
    except subprocess.TimeoutExpired:
        return f"did not end within --limit; see {folder}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    outputs = [(folder / f"output_{rank}.txt").read_text(encoding="utf-8") for rank, code in enumerate(codes) if code]
    reasons = [tuning.reason(output) for output in outputs]
    # the rank that failed first knows why, the others only that it did
    return max(reasons, key=lambda text: "Error" in text) if reasons else None


def compare(one: Measurement, folder: Path, base: Path) -> None:
    """Compare the weights at the end with the base's."""
    from neuclip_ds.checkpoint.sharded_state import WEIGHT, StateFiles

    own, theirs, before = StateFiles(folder / END), StateFiles(base / END), StateFiles(base / START)
    largest = apart = way = 0.0
    for name in theirs.names():
        weight = theirs.read(name, WEIGHT).double()
        change = own.read(name, WEIGHT).double() - weight
        largest = max(largest, float(change.abs().max()))
        apart += float(change.square().sum())
        way += float((weight - before.read(name, WEIGHT).double()).square().sum())
    one.difference, one.drift = largest, (apart / way) ** 0.5 if way else None
