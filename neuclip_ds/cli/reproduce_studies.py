"""`neuclip-ds reproduce`: the two studies, from jobs to their reports."""

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from neuclip_ds.checkpoint.checkpoints import complete_checkpoints
from neuclip_ds.checkpoint.export import export_run
from neuclip_ds.cli.program import progress_bar
from neuclip_ds.data.demo import demo_split
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import nearest
from neuclip_ds.reproduction import cold_start, cold_start_report, report, study
from neuclip_ds.reproduction.data import prepare
from neuclip_ds.reproduction.recovery_difference import recovery_difference
from neuclip_ds.reproduction.runner import Runner

PRETRAINING_SHARE = 0.6  # of the shards


def methods(arguments: argparse.Namespace) -> None:
    """Compare every method: search, finals, ablations and cost."""
    out: Path = arguments.out
    runner = prepared(arguments, arguments.pairs)
    regimes = tuple(map(study.Regime.parse, arguments.regimes))
    arms = chosen(arguments.arms)
    sizes = study.Study(arguments.seeds, arguments.anchors, str(arguments.pretrained or ""))
    stages = arguments.stages

    def results_of(stage: str, jobs: Iterable[study.Job], runner: Runner = runner) -> None:
        jobs = list(jobs)
        if stage in stages and jobs:
            run(runner, jobs, stage)

    best = search(runner, {*map(study.nearest_search, regimes)}, {study.method_of(arm) for arm in arms}, sizes)
    results_of("finals", study.finals(regimes, arms, best, sizes))
    if "ablations" in stages:
        first = regimes[:1]
        methods = {study.method_of(arm) for arm in study.ABLATIONS}
        best |= search(runner, {*map(study.nearest_search, first)}, methods, sizes)
        results_of("ablations", study.finals(first, study.ABLATIONS, best, sizes))
    alone = Runner((out / "data").resolve(), (out / "runs").resolve(), None, processes=1)
    results_of("cost", study.cost(best, sizes), alone)
    report.write(alone.known, out, f"Miniature reproduction on {arguments.source}")
    print(f"The report is {out}/report.html (report.md and results.jsonl are next to it).")


def chosen(names: Sequence[str]) -> list[str]:
    """Return names of arms.

    Raises:
        UserError: one is unknown.
    """
    known = {**study.ARMS, **study.ABLATIONS}
    for name in names:
        if name not in known:
            raise UserError(f"Unknown arm {name}{nearest(name, known) or '.'} Arms: {'; '.join(known)}.")
    return list(names)


def search(
    runner: Runner, regimes: set[study.Regime], methods: set[str], sizes: study.Study
) -> dict[tuple[study.Regime, str], study.Point]:
    """Return the best point of every method in every regime, searched in rounds of runs."""
    scores: dict[tuple[study.Regime, str], dict[study.Point, float]] = {
        (regime, method): {} for regime in sorted(regimes) for method in study.SEARCHES if method in methods
    }
    while True:
        asked = {
            study.search_job(method, regime, point, sizes): (regime, method, point)
            for (regime, method), known in scores.items()
            for point in study.next_points(known, study.SEARCHES[method])
        }
        if not asked:
            return {which: max(known, key=lambda point: known[point]) for which, known in scores.items()}
        found = run(runner, list(asked), "search")
        for job, (regime, method, point) in asked.items():
            scores[regime, method][point] = report.mean_recall(found[job.name])


def tuneclip(arguments: argparse.Namespace) -> None:
    """Compare fine-tuning with and without recovered statistics."""
    out: Path = arguments.out
    runner = prepared(arguments)
    plan = cold_start_plan(arguments)
    seeds = range(arguments.seeds + 1)  # seed 0 is the search's
    run(runner, [cold_start.pretraining(plan, seed) for seed in seeds], "pretraining")
    for seed in seeds:
        if not (plan.models / f"seed{seed}").is_dir():
            export_run(plan.runs / f"pretrain/seed{seed}", "transformers", plan.models / f"seed{seed}")
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
            raise UserError(f"{job.name} diverged at the learning rate that its search found; see its output.txt.")
        curves.setdefault(job.name.split("/")[1], []).append(runner.curve(job.name))
    differences = differences_of_recoveries(plan, arguments.seeds)
    tables = [cold_start_report.recoveries(recovered), cold_start_report.differences(differences)]
    record = {"search": searched, "curves": curves, "recovered": recovered, "differences": differences}
    (out / "tuneclip.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    cold_start_report.write(curves, searched, tables, out, f"Fine-tuning with and without recovery, {arguments.source}")
    print(f"The report is {out}/tuneclip.html (tuneclip.md, .png and .json are next to it).")


def prepared(arguments: argparse.Namespace, pairs: int | None = None) -> Runner:
    """Make the study's splits; the runner evaluates on the zero-shot set next to the source, if there is one."""
    demo, out = arguments.source.startswith("demo:"), arguments.out.resolve()
    source = Path(demo_split(arguments.source, Path(".cache"))) if demo else Path(arguments.source)
    prepare(source, out / "data", validation=1000, test=2000, pairs=pairs)
    images = source.parent.resolve() / "zero_shot"
    return Runner(out / "data", out / "runs", images if images.is_dir() else None, arguments.processes)


def cold_start_plan(arguments: argparse.Namespace) -> cold_start.Plan:
    out = arguments.out.resolve()
    shards = sorted((out / "data" / "train").glob("*.tar"))
    first = int(PRETRAINING_SHARE * len(shards))
    if not first or first == len(shards):
        raise UserError(f"{arguments.source} has {len(shards)} shards of 500 pairs, but the study needs at least two.")
    pretraining, tuning = (
        f"train/{{{','.join(path.stem for path in part)}}}.tar" for part in (shards[:first], shards[first:])
    )
    epoch_steps = -(-500 * (len(shards) - first) // arguments.batch)  # the last of the shards may have fewer
    sizes = (arguments.batch, arguments.pretraining_epochs, arguments.epochs, epoch_steps)
    return cold_start.Plan(pretraining, tuning, *sizes, out / "models", out / "runs")


def differences_of_recoveries(plan: cold_start.Plan, seeds: int) -> list[dict[str, float]]:
    """Return how the cached recovery differs from the full one, a row per seed."""
    folders = [plan.runs / "recover" / name for name in (cold_start.FULL, cold_start.CACHED)]
    pairs = (
        [max(complete_checkpoints(folder / f"seed{seed}/recovery/checkpoints")) for folder in folders]
        for seed in range(1, seeds + 1)
    )
    return [recovery_difference(*pair) for pair in pairs]


def run(runner: Runner, jobs: list[study.Job], title: str) -> dict[str, dict[str, float]]:
    """Run jobs behind a progress bar; return results by job."""
    done = itertools.count(1)
    with progress_bar(title) as show:
        show(0, len(jobs))
        return runner.run(jobs, lambda: show(next(done), len(jobs)))
