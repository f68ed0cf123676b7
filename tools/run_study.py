"""Compare the losses by training small heads on frozen features, or small towers, for thousands of steps on CPU cores.

The first call computes the features; with --pixels or --trainer, it writes the towers' inputs instead.
OUT/results.jsonl receives a line for each completed run, so the same command resumes an interrupted study.
tools/study/plan.yaml lists the arms (losses with their options) and the stages (groups of runs). With --pixels,
OUT/results.jsonl must already contain the lines of the stage guided_search, as docs/reference/results.md shows.

Examples:
  python tools/run_study.py /data/flickr8k --stages gate oracles
  python tools/run_study.py demo:20000 --out runs/scenes --grid 2
  python tools/run_study.py demo:12000 --out runs/towers --pixels
  python tools/run_study.py demo:16000 /data/flickr8k --out runs/trained --trainer 2> trainer.log
  python tools/run_study.py --tables tools/study/flickr8k.jsonl
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from data_files import commit, processor
from study.features import Splits, cache_features, load_splits, tars_in
from study.fine_tuning import fine_tune
from study.guides import guide_path, save_guide
from study.loop import Run, train
from study.pixels import cache_pixels
from study.tables import end_last_line, parse_name, read_results, tables
from study.towers import prepare_shards, train_towers

from neuclip_ds.cli.program import Parser, exit_on_mistake, positive_integer
from neuclip_ds.data.children import end_with_parent
from neuclip_ds.errors import UserError, counted, explained, require_package
from neuclip_ds.recipe import nearest

PLAN = yaml.safe_load(Path(__file__).with_name("study").joinpath("plan.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to execute: its name, its training settings, its held-out split, and the folder of its data."""

    name: str
    run: Run
    split: str
    features: Path
    saved_as: str = ""  # name under which later runs use its heads as a reference or a teacher


class Selection(NamedTuple):
    """The arms and the batch sizes of the stages that are run; None selects all of them."""

    arms: Sequence[str] | None = None
    batches: Sequence[int] | None = None  # those of a stage, without the arms' `batch_factor`

    def has(self, arm: str, batch: int) -> bool:
        """Return whether the runs of an arm with a batch size are selected."""
        has_arm = self.arms is None or arm in self.arms
        has_batch = self.batches is None or batch in self.batches
        return has_arm and has_batch


EVERYTHING = Selection()


def main() -> None:
    parser = Parser(prog="run_study.py", description=__doc__)
    parser.add_argument(
        "source", nargs="*", type=data_source, help="folder with shards in train/ and val/, or demo:N for N scenes"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder for features and results")
    parser.add_argument(
        "--grid",
        type=positive_integer,
        default=1,
        help="use the concatenated means of the tower's output in GRID x GRID cells as image features",
    )
    parser.add_argument(
        "--pixels",
        action="store_true",
        help="train small towers on pixels and words, instead of heads on frozen towers",
    )
    parser.add_argument("--trainer", action="store_true", help="train towers with the trainer, on one or two sources")
    parser.add_argument("--larger", action="store_true", help="with --trainer: larger towers and batches, for a GPU")
    parser.add_argument(
        "--stages",
        nargs="+",
        help="stages of plan.yaml to run, in this order or, with --tables, the stages whose tables are printed "
        "(default: all stages for this data or, with --tables, all stages in its file)",
    )
    parser.add_argument("--arms", nargs="+", help="arms of the stages to run (default: all)")
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        help="batch sizes of the stages to run, or of the tables to print (default: all)",
    )
    parser.add_argument(
        "--processes",
        type=positive_integer,
        default=2,
        help="number of concurrent runs, each with one CPU thread",
    )
    parser.add_argument(
        "--tables", type=Path, help="print the tables of this results.jsonl instead of running the study"
    )
    parser.add_argument(
        "--figures",
        type=Path,
        help="folder for figures of the first stage in --stages; the stage may have at most 20 settings (a setting is "
        "an arm with one value for each option that the stage varies)",
    )
    with exit_on_mistake():
        options = parser.parse(sys.argv[1:])
        check_options(options)
        if options.tables is None:
            study(options)
        known = read_results(options.tables or options.out / "results.jsonl")
        print(tables(results_to_print(known, options)))
        if options.figures is not None:
            from study.figures import draw  # needs matplotlib, which runs do not

            print("drawn:", *draw(known, options.stages[0], options.figures))


def data_source(text: str) -> str:
    """Parse a source of data: a folder, or demo:N; raise `ArgumentTypeError` if N is not a number."""
    if text.startswith("demo:") and not text.removeprefix("demo:").isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must end in a number of scenes, as in demo:12000")
    return text


def check_options(options: argparse.Namespace) -> None:
    """Check the command line before data are prepared, and create the folders that it names.

    Raises:
        UserError: the source, --stages or matplotlib is needed but missing; the sources do not fit together, or a stage
            does not fit the source; or an option has no effect, names something unknown, or names a file or folder that
            cannot be used.
    """
    if options.figures is not None:
        if not options.stages:
            raise UserError("--figures draws the first stage in --stages: pass --stages.")
        require_package("matplotlib", "--figures", "docs")
        _create_folder("--figures", options.figures)
    if options.tables is not None:
        if options.source or options.arms:
            raise UserError("--tables prints the results of all arms and runs nothing: omit the source and --arms.")
        if not options.tables.is_file():
            raise UserError(f"--tables={options.tables} is not a file: pass a results.jsonl.")
        return
    if not options.source:
        raise UserError("Pass the data: a folder with shards in train/ and val/, or demo:N.")
    kinds = {source.startswith("demo:") for source in options.source}
    if len(options.source) > 1 and (not options.trainer or len(kinds) < len(options.source)):
        raise UserError(
            "Pass one source. With --trainer, you can pass two: scenes (demo:N) and a folder of photographs."
        )
    require_known("stage", options.stages, PLAN["stages"])
    plans = [PLAN["stages"][stage] for stage in stages_to_run(options)]
    arms: dict[str, None] = {}
    batch_sizes: dict[int, None] = {}
    for plan in plans:
        arms |= dict.fromkeys(plan["arms"])
        batch_sizes |= dict.fromkeys(plan["batch"])
    require_known("arm", options.arms, arms)
    require_known("batch size", options.batch, batch_sizes)
    _create_folder("--out", options.out)


def require_known(kind: str, names: Sequence[Any] | None, known: Collection[Any]) -> None:
    """Raise UserError if a name is not among the known ones; the message suggests one of them, or lists all."""
    for name in names or []:
        if name not in known:
            all_names = ", ".join(map(str, known))
            hint = nearest(str(name), map(str, known)) or f"; choose from {all_names}."
            raise UserError(f"There is no {kind} {name} to run or to print{hint}")


def _create_folder(option: str, folder: Path) -> None:
    with explained(f"{option}={folder} cannot be created", "pass another folder"):
        folder.mkdir(parents=True, exist_ok=True)


def results_to_print(known: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of the stages and batch sizes that the command line selects.

    Raises:
        UserError: the file in --tables contains no results of a selected stage or batch size.
    """
    names = {name: parse_name(name) for name in known}
    if options.tables is not None:
        require_known("stage", options.stages, dict.fromkeys(name.stage for name in names.values()))
        require_known("batch size", options.batch, dict.fromkeys(name.batch for name in names.values()))
    selected: dict[str, Any] = {}
    for name, (stage, _, batch, _, _) in names.items():
        if stage in (options.stages or [stage]) and batch in (options.batch or [batch]):
            selected[name] = known[name]
    return selected


def study(options: argparse.Namespace) -> None:
    """Execute the remaining runs of the stages."""
    for source in options.source:
        prepare(source, options)
    stages = stages_to_run(options)
    selection = Selection(options.arms, options.batch)
    path = options.out / "results.jsonl"
    end_last_line(path)
    hardware = f"{processor()}, {counted(options.processes, 'run')} at a time, torch {torch.__version__}"
    origin = {"commit": commit(), "hardware": hardware}
    # not a multiprocessing.Pool, because the trainer may start processes, which a daemonic process may not
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.processes, spawn, _start_process, (os.getpid(),))
    with pool, _kills_runs_on_stop(), path.open("a") as file:
        for stage, features in stages.items():
            while True:  # the results of some runs of a search decide which runs follow
                known = read_results(path)
                todo = missing(stage, known, features, selection)
                if not todo:
                    break
                remaining = planned(stages, known, selection)
                print(estimate("the plan", remaining, known, options.processes))
                print(estimate(stage, todo, known, options.processes), flush=True)
                for number, record in enumerate(_in_order_of_end(pool, options.processes, todo), 1):
                    record |= origin | {"date": date.today().isoformat()}
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    results = record["results"]
                    progress = f"{number}/{len(todo)} {record['name']}"
                    print(f"{progress}: recall {results['recall']:.2f}%, {results['seconds']:.0f} s", flush=True)


@contextmanager
def _kills_runs_on_stop() -> Iterator[None]:
    """Kill the runs in progress after a stop signal, which they ignore; otherwise, the program would wait for them."""
    try:
        yield
    except KeyboardInterrupt:
        for run in multiprocessing.active_children():
            run.kill()
        raise


def _in_order_of_end(pool: ProcessPoolExecutor, processes: int, todo: list[Job]) -> Iterator[dict[str, Any]]:
    """Execute runs, and yield the record of each one when it ends; after an error, no other run begins."""
    jobs_left = iter(todo)
    running = {pool.submit(do, job) for job in itertools.islice(jobs_left, processes)}
    while running:
        ended, running = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            yield future.result()
        running |= {pool.submit(do, job) for job in itertools.islice(jobs_left, len(ended))}


def folder_of(source: str, options: argparse.Namespace) -> Path:
    """Return the folder for the data of a source."""
    name = "features"
    if options.trainer:
        name = "scenes" if source.startswith("demo:") else "photographs"
    folder: Path = options.out / name
    return folder


def prepare(source: str, options: argparse.Namespace) -> None:
    """Write a source's data for the runs (shards, pixels or features) to its folder, unless they already exist.

    Raises:
        UserError: the folder contains other data, the source contains no shards, or a package with a tower is not
            installed or contains different weights.
    """
    folder = folder_of(source, options)
    if options.trainer:
        record_origin(folder, source, "shards")
        prepare_shards(source, folder)
    elif options.pixels:
        record_origin(folder, source, "pixels")
        cache_pixels(source, folder)
    else:
        record_origin(folder, source, f"features, grid {options.grid}")
        cache_features(source, folder, options.grid)


def record_origin(folder: Path, source: str, kind: str) -> None:
    """Write the origin of data next to the folder that will contain them, or compare it with that of existing data.

    Data from earlier versions have no record of their origin; they are used without this check.

    Raises:
        UserError: the data are of another source or kind, or the source contains no shards.
    """
    is_rendered = source.startswith("demo:")
    origin = {"source": source if is_rendered else str(Path(source).resolve()), "kind": kind}
    record = folder.with_name(f"{folder.name}_origin.json")
    if not folder.exists() or not any(folder.iterdir()):
        if not is_rendered:
            for split in ("train", "val"):
                tars_in(Path(source) / split)
        record.write_text(json.dumps(origin) + "\n", encoding="utf-8")
    elif record.exists():
        recorded = json.loads(record.read_text(encoding="utf-8"))
        if recorded != origin:
            raise UserError(
                f"{folder} contains data of {recorded['source']} ({recorded['kind']}), not of {origin['source']} "
                f"({kind}): pass another --out."
            )


def stages_to_run(options: argparse.Namespace) -> dict[str, Path]:
    """Return the stages to run, in order, each with the folder of its data.

    These are the stages that the command line names or, by default, all stages that match its options and the kind of
    source (scenes or photographs). With several sources, a source gets only the stages of its kind.

    Raises:
        UserError: a stage that the command line names, or each stage of the plan, is for other data.
    """
    stages: dict[str, Path] = {}
    for stage, source in itertools.product(options.stages or PLAN["stages"], options.source):
        plan = PLAN["stages"][stage]
        is_for_towers = all(plan.get(name, False) == getattr(options, name) for name in ("pixels", "trainer"))
        is_for_size = plan.get("larger", False) == options.larger
        is_for_source = plan.get("scenes", False) == source.startswith("demo:")
        is_named = options.stages is not None and len(options.source) == 1
        if is_for_towers and (is_named or (is_for_size and is_for_source)):
            stages[stage] = folder_of(source, options)
    unused = [stage for stage in options.stages or [] if stage not in stages]
    if unused:
        plan = PLAN["stages"][unused[0]]
        needed = ["demo:N" if plan.get("scenes", False) else "FOLDER"]
        needed += [f"--{name}" for name in ("pixels", "trainer", "larger") if plan.get(name, False)]
        raise UserError(f"The stage {unused[0]} is for other data: run it with the arguments {' '.join(needed)}.")
    if not stages:
        raise UserError("No stage of tools/study/plan.yaml is for this source with these options: pass --stages.")
    return stages


def missing(stage: str, known: Mapping[str, Any], features: Path, selection: Selection = EVERYTHING) -> list[Job]:
    """Return the selected runs of a stage that have not ended, or whose heads later runs need but `features` lacks.

    Raises:
        UserError: results.jsonl contains one of the runs with other settings, or a search has not ended.
    """
    all_jobs = jobs(stage, known, features, selection)
    return [job for job in all_jobs if not is_known(job, known) or _lacks_heads(job)]


def planned(stages: Mapping[str, Path], known: Mapping[str, Any], selection: Selection = EVERYTHING) -> list[Job]:
    """Return the remaining selected runs of the stages.

    The runs that follow a search depend on its scores, which are unknown before the search ends; here, all settings of
    the search count as equally good.
    """
    known = dict(known)
    planned_jobs: list[Job] = []
    for stage, features in stages.items():
        while True:
            todo = [job for job in jobs(stage, known, features, selection) if job.name not in known]
            if not todo:
                break
            planned_jobs += todo
            known |= {job.name: {"run": asdict(job.run), "results": {"recall": 0.0}} for job in todo}
    return planned_jobs


def estimate(stage: str, todo: list[Job], known: Mapping[str, Any], processes: int) -> str:
    """Return a sentence with the estimated hours of runs, from the CPU seconds of earlier runs.

    The seconds per epoch depend on the loss, the batch size and the towers, but barely on the loss's options.
    """
    epoch_seconds: dict[tuple[str, int, str], list[float]] = {}
    start_seconds: dict[tuple[str, int, str], list[float]] = {}
    for record in known.values():
        run = Run(**record["run"])
        results = record["results"]
        start = results.get("start_seconds", 0.0)
        epoch_seconds.setdefault(_kind(run), []).append((results["seconds"] - start) / run.epochs)
        start_seconds.setdefault(_kind(run), []).append(start)
    seconds = 0.0
    unknown = 0
    for job in todo:
        kind = _kind(job.run)
        if kind in epoch_seconds:
            seconds += statistics.median(start_seconds[kind]) + statistics.median(epoch_seconds[kind]) * job.run.epochs
        else:
            unknown += 1
    if unknown == len(todo):
        return f"{stage}: {counted(len(todo), 'run')}, of unknown duration because no similar run has ended"
    sentence = f"{stage}: {counted(len(todo), 'run')}, about {seconds / processes / 3600:.1f} hours"
    return f"{sentence}, not counting {counted(unknown, 'run')} of unknown duration" if unknown else sentence


def _kind(run: Run) -> tuple[str, int, str]:
    """Return the properties that determine a run's seconds per epoch: its loss, batch size and towers."""
    return run.loss, run.batch, run.recipe


def _lacks_heads(job: Job) -> bool:
    return bool(job.saved_as) and not guide_path(job.features / "guides", job.saved_as).is_file()


def jobs(stage: str, known: Mapping[str, Any], features: Path, selection: Selection = EVERYTHING) -> Iterator[Job]:
    """Yield the selected runs of a stage.

    In a search, all points run with the first seed. Once these runs have ended, the best `shortlist` points also run
    with the other seeds.

    Raises:
        UserError: the stage follows a search that has not ended.
    """
    plan = PLAN["stages"][stage]
    seeds = range(1, plan["seeds"] + 1)
    for batch, seed, arm in itertools.product(plan["batch"], seeds, plan["arms"]):
        if not selection.has(arm, batch):
            continue
        settings = {key: value for key, value in PLAN["arms"][arm].items() if key not in ("grid", "batch_factor")}
        settings |= plan.get("set", {})
        if "best_of" in plan and grid_of(plan["best_of"], arm):
            settings = with_settings(settings, best_of(plan["best_of"], arm, known))
        grid = dict(plan.get("vary", {}))
        if plan.get("grid"):
            grid |= grid_of(stage, arm)
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            label = "".join(f"/{key.split('.')[-1]}={value:g}" for key, value in point.items())
            setting = f"{stage}/{arm}/B{batch}{label}"
            if seed == 1 or "shortlist" not in plan or setting in shortlist(stage, arm, known):
                yield Job(
                    name=f"{setting}/seed{seed}",
                    run=Run(
                        batch=batch * PLAN["arms"][arm].get("batch_factor", 1),
                        seed=seed,
                        **with_settings(settings, point),
                    ),
                    split=plan.get("split", "test"),
                    features=features,
                    saved_as=plan.get("saved_as", ""),
                )


def shortlist(stage: str, arm: str, known: Mapping[str, Any]) -> list[str]:
    """Return the settings of a search that run with all seeds; none until all runs of the first seed have ended."""
    recalls: dict[str, float] = {}  # with the first seed
    for name, record in known.items():
        if name.startswith(f"{stage}/{arm}/") and name.endswith("/seed1"):
            recalls[name] = record["results"]["recall"]
    points = math.prod(len(values) for values in grid_of(stage, arm).values())
    if len(recalls) < points:
        return []
    best_first = sorted(recalls, key=lambda name: -recalls[name])
    return [name.removesuffix("/seed1") for name in best_first[: PLAN["stages"][stage]["shortlist"]]]


def grid_of(stage: str, arm: str) -> dict[str, list[Any]]:
    """Return the values that a search tries for an arm, by setting; a stage's `grids` replace those of the arms."""
    grid: dict[str, list[Any]] = PLAN["stages"][stage].get("grids", {}).get(arm) or PLAN["arms"][arm].get("grid", {})
    return grid


def with_settings(settings: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings with the values of `point`, whose names are dotted paths."""
    copied: dict[str, Any] = json.loads(json.dumps(settings))
    for name, value in point.items():
        *path, last = name.split(".")
        section = copied
        for key in path:
            section = section.setdefault(key, {})
        section[last] = value
    return copied


def best_of(stage: str, arm: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the point of a search with the best mean score over its seeds.

    Raises:
        UserError: the search has not ended.
    """
    seeds = range(1, PLAN["stages"][stage]["seeds"] + 1)
    candidates = [[f"{setting}/seed{seed}" for seed in seeds] for setting in shortlist(stage, arm, known)]
    missing_runs = [name for names in candidates for name in names if name not in known]
    if not candidates or missing_runs:
        raise UserError(
            f"results.jsonl lacks runs of the stage {stage} for the arm {arm}: run this stage first, or add the lines "
            "of these runs."
        )

    def mean_recall(names: list[str]) -> float:
        return statistics.mean(known[name]["results"]["recall"] for name in names)

    best = max(candidates, key=mean_recall)
    return {key: _get(known[best[0]]["run"], key) for key in grid_of(stage, arm)}


def _get(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree


def is_known(job: Job, known: Mapping[str, Any]) -> bool:
    if job.name not in known:
        return False
    if Run(**known[job.name]["run"]) != job.run:
        raise UserError(
            f"results.jsonl contains the run {job.name} with other settings; remove its line to repeat the run."
        )
    return True


def _start_process(parent: int) -> None:
    end_with_parent(parent)
    torch.set_num_threads(1)


@cache
def _splits(features: Path) -> Splits:
    return load_splits(features)


def do(job: Job) -> dict[str, Any]:
    """Train a run in this process, and return its record."""
    if job.run.recipe:
        results = train_towers(job.features, job.split, job.run, job.name)
        return {"name": job.name, "run": asdict(job.run), "results": _rounded(results)}
    splits = _splits(job.features)
    began = time.process_time()
    held_out = getattr(splits, job.split)
    if job.run.fine_tunes:
        results = fine_tune(splits.train, held_out, job.run)
    else:
        guides = job.features / "guides"
        trained = train(splits.train, held_out, job.run, guides=guides)
        if job.saved_as:
            save_guide(guide_path(guides, job.saved_as), trained, job.run)
        results = trained.results
    results["seconds"] = time.process_time() - began
    return {"name": job.name, "run": asdict(job.run), "results": _rounded(results)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return value


if __name__ == "__main__":
    main()
