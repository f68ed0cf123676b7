"""`neuclip-ds reproduce methods`: the study of all methods, from jobs to its report."""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from neuclip_ds.cli.program import progress_bar
from neuclip_ds.data.demo import demo_split
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import nearest
from neuclip_ds.reproduction import report, study
from neuclip_ds.reproduction.data import prepare
from neuclip_ds.reproduction.runner import Runner


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


def prepared(arguments: argparse.Namespace, pairs: int | None = None) -> Runner:
    """Make the study's splits; the runner evaluates on the zero-shot set next to the source, if there is one."""
    demo, out = arguments.source.startswith("demo:"), arguments.out.resolve()
    source = Path(demo_split(arguments.source, Path(".cache"))) if demo else Path(arguments.source)
    prepare(source, out / "data", validation=1000, test=2000, pairs=pairs)
    images = source.parent.resolve() / "zero_shot"
    return Runner(out / "data", out / "runs", images if images.is_dir() else None, arguments.processes)


def run(runner: Runner, jobs: list[study.Job], title: str) -> dict[str, dict[str, float]]:
    """Run jobs behind a progress bar; return results by job."""
    done = itertools.count(1)
    with progress_bar(title) as show:
        show(0, len(jobs))
        return runner.run(jobs, lambda: show(next(done), len(jobs)))
