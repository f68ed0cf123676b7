"""The papers' comparisons in miniature: every method with the same data, towers, budget and search.

Stages: `search` (2 x 2 grid a method, one seed, validation split), `finals` (the best point, over the seeds, test
split), `sweeps` (batch size, data set size, ablations), `cost` (time of a step, one run at a time). A study that is
broken off goes on where it was.

Example: python tools/reproduce.py ../shared/data/flickr8k/train --out runs/reproduction --stages search finals
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from neuclip_ds.cli import exit_on_mistake
from neuclip_ds.data.demo import demo_split
from neuclip_ds.reproduction import report, study
from neuclip_ds.reproduction.data import prepare
from neuclip_ds.reproduction.runner import Runner

STAGES = ("search", "finals", "sweeps", "cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder of img2dataset shards, or demo:train")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduction"), help="data, runs and report go here")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--batch", type=int, default=128, help="global batch B (128)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of every run (3)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of finals and sweeps (3)")
    parser.add_argument("--anchors", type=int, default=1000, help="anchors of the normaliser's error (1000)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (2)")
    arguments = parser.parse_args()
    exit_on_mistake(lambda: reproduce(arguments))


def reproduce(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    demo = arguments.source.startswith("demo:")
    source = Path(demo_split(arguments.source, Path(".cache"))) if demo else Path(arguments.source)
    prepare(source, out / "data", validation=500, test=1000)
    zero_shot = source.parent / "zero_shot"
    images = zero_shot.resolve() if zero_shot.is_dir() else None
    runner = Runner((out / "data").resolve(), (out / "runs").resolve(), images, arguments.processes)
    budget = study.Budget(arguments.batch, arguments.epochs, arguments.seeds, arguments.anchors)
    searched = study.search(budget)
    results = run(runner, searched, "search") if "search" in arguments.stages else known(runner, searched)
    best = {
        method: max(
            (job for job in searched if job.method == method),
            key=lambda job: report.mean_recall(results.get(job.name, {})),
        ).options
        for method in study.KNOBS
    }
    for stage, jobs in (("finals", study.finals(best, budget)), ("sweeps", list(study.sweeps(best, budget)))):
        results.update(run(runner, jobs, stage) if stage in arguments.stages else known(runner, jobs))
    alone = Runner((out / "data").resolve(), (out / "runs").resolve(), None, processes=1)
    costs = study.cost(best)
    results.update(run(alone, costs, "cost") if "cost" in arguments.stages else known(alone, costs))
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    report.write(results, out, f"Miniature reproduction on {arguments.source}")
    print(f"The report is {out}/report.html (report.md, results.json beside it).")


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
