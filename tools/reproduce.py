"""The papers' comparisons in miniature, on small towers that two cores carry.

`methods`: every method with the same data, towers, budget and search. Stages: `search` (2 x 2 grid a method, one
seed, validation split), `finals` (the best point, over the seeds, test split), `sweeps` (batch size, data set size,
ablations), `cost` (time of a step, one run at a time).

`tuneclip`: models pretrained on one part of the data are fine-tuned on another, with and without recovered statistics.

A study that is broken off goes on where it was.

Examples: python tools/reproduce.py methods ../shared/data/flickr8k/train --out runs/flickr --stages search finals
          python tools/reproduce.py tuneclip demo:train --out runs/cold_start
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from neuclip_ds.cli import exit_on_mistake
from neuclip_ds.data.demo import demo_split
from neuclip_ds.errors import UserError
from neuclip_ds.reproduction import cold_start, cold_start_report, report, study
from neuclip_ds.reproduction.data import prepare
from neuclip_ds.reproduction.runner import Runner

STAGES = ("search", "finals", "sweeps", "cost")
PRETRAINING_SHARE = 0.6  # of the shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("methods", "tuneclip"))
    parser.add_argument("source", nargs="?", default="demo:train", help="folder of img2dataset shards, or demo:train")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduction"), help="data, runs and report go here")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="of `methods`")
    parser.add_argument("--batch", type=int, default=128, help="global batch B (128)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of every run, of fine-tuning in `tuneclip` (3)")
    parser.add_argument("--pretraining-epochs", type=int, default=8, help="of `tuneclip` (8)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of finals and sweeps (3)")
    parser.add_argument("--anchors", type=int, default=1000, help="anchors of the normaliser's error (1000)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (2)")
    arguments = parser.parse_args()
    exit_on_mistake(lambda: {"methods": methods, "tuneclip": tuneclip}[arguments.study](arguments))


def methods(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    images = prepared(arguments)
    runner = Runner((out / "data").resolve(), (out / "runs").resolve(), images, arguments.processes)
    budget = study.Budget(arguments.batch, arguments.epochs, arguments.seeds, arguments.anchors)
    searched = study.search(budget)
    results = run(runner, searched, "search") if "search" in arguments.stages else known(runner, searched)
    best = {
        method: max(
            (job for job in searched if job.method == method),
            key=lambda job: report.mean_recall(results.get(job.name, {})),
        ).options
        for method in study.SEARCHES
    }
    for stage, jobs in (("finals", study.finals(best, budget)), ("sweeps", list(study.sweeps(best, budget)))):
        results.update(run(runner, jobs, stage) if stage in arguments.stages else known(runner, jobs))
    alone = Runner((out / "data").resolve(), (out / "runs").resolve(), None, processes=1)
    costs = study.cost(best)
    results.update(run(alone, costs, "cost") if "cost" in arguments.stages else known(alone, costs))
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    report.write(results, out, f"Miniature reproduction on {arguments.source}")
    print(f"The report is {out}/report.html (report.md, results.json beside it).")


def tuneclip(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    images = prepared(arguments)
    runner = Runner((out / "data").resolve(), (out / "runs").resolve(), images, arguments.processes)
    plan = cold_start_plan(arguments)
    seeds = range(arguments.seeds + 1)  # seed 0 is the search's
    run(runner, [cold_start.pretraining(plan, seed) for seed in seeds], "pretraining")
    for seed in seeds:
        export(plan.runs / f"pretrain/seed{seed}", plan.models / f"seed{seed}")
    recovered = run(
        runner, [cold_start.recovery(plan, name, seed) for name in cold_start.RECOVERIES for seed in seeds], "recovery"
    )
    searched: dict[str, dict[float, float]] = {}
    jobs = cold_start.search(plan)
    found = run(runner, jobs, "search")
    for job in jobs:
        scores = searched.setdefault(job.name.split("/")[1], {})
        scores[job.options["optimizer.lr"]] = report.mean_recall(found[job.name])
    best = {name: max(scores, key=lambda lr: scores[lr]) for name, scores in searched.items()}
    finals = cold_start.finals(plan, best, arguments.seeds)
    done = run(runner, finals, "fine-tuning")
    curves: dict[str, list[cold_start_report.Curve]] = {}
    for job in finals:
        if not done[job.name]:
            raise UserError(f"{job.name} diverged at the learning rate that its search has found: see its output.txt.")
        curves.setdefault(job.name.split("/")[1], []).append(runner.curve(job.name))
    differences = differences_of_recoveries(plan, arguments.seeds)
    tables = [cold_start_report.recoveries(recovered), cold_start_report.differences(differences)]
    record = {"search": searched, "curves": curves, "recovered": recovered, "differences": differences}
    (out / "tuneclip.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    cold_start_report.write(curves, searched, tables, out, f"Fine-tuning with and without recovery, {arguments.source}")
    print(f"The report is {out}/tuneclip.html (tuneclip.md, tuneclip.png, tuneclip.json beside it).")


def prepared(arguments: argparse.Namespace) -> Path | None:
    """Makes the study's splits; the zero-shot set beside the source, if there is one."""
    demo = arguments.source.startswith("demo:")
    source = Path(demo_split(arguments.source, Path(".cache"))) if demo else Path(arguments.source)
    prepare(source, arguments.out / "data", validation=500, test=1000)
    zero_shot = source.parent / "zero_shot"
    return zero_shot.resolve() if zero_shot.is_dir() else None


def cold_start_plan(arguments: argparse.Namespace) -> cold_start.Plan:
    out = arguments.out.resolve()
    shards = sorted((out / "data" / "train").glob("*.tar"))
    first = int(PRETRAINING_SHARE * len(shards))
    if not first or first == len(shards):
        raise UserError(f"{arguments.source} gives {len(shards)} shards of 500 pairs; two parts need at least two.")
    pretraining, tuning = (
        f"train/{{{','.join(path.stem for path in part)}}}.tar" for part in (shards[:first], shards[first:])
    )
    pairs = 500 * (len(shards) - first)  # prepare writes shards of 500, the last may have fewer
    return cold_start.Plan(
        pretraining,
        tuning,
        arguments.batch,
        arguments.pretraining_epochs,
        arguments.epochs,
        -(-pairs // arguments.batch),
        out / "models",
        out / "runs",
    )


def export(run_folder: Path, model: Path) -> None:
    """The pretrained model as transformers has it, as a user would hand it on."""
    from neuclip_ds.checkpoint.export import export_run  # torch and deepspeed take seconds to import

    if not model.is_dir():
        export_run(run_folder, "transformers", model)


def differences_of_recoveries(plan: cold_start.Plan, seeds: int) -> list[dict[str, float]]:
    """Of the cached recovery from the full one, a row a seed."""
    from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
    from neuclip_ds.reproduction.recovery_difference import recovery_difference

    found = []
    for seed in range(1, seeds + 1):
        pair = [
            max(complete_checkpoints(plan.runs / f"recover/{name}/seed{seed}/recovery/checkpoints"))
            for name in (cold_start.FULL, cold_start.CACHED)
        ]
        difference = recovery_difference(*pair)
        row = {key: value for key, value in difference._asdict().items() if key != "moments"}
        for kind, moment in difference.moments.items():
            row.update({f"{kind} {key}": value for key, value in moment._asdict().items()})
        found.append(row)
    return found


def run(runner: Runner, jobs: list[study.Job], title: str) -> dict[str, dict[str, float]]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=len(jobs))
        return runner.run(jobs, lambda: progress.advance(task))


def known(runner: Runner, jobs: list[study.Job]) -> dict[str, dict[str, float]]:
    found = {job.name: runner.results(job.name) for job in jobs}
    return {name: results for name, results in found.items() if results is not None}


if __name__ == "__main__":
    main()
