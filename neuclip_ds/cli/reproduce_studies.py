"""`neuclip-ds reproduce methods`: the study of all methods, from jobs to its report."""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.program import progress_bar
from neuclip_ds.data.demo import demo_split
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import nearest, parse
from neuclip_ds.reproduction import packaged_towers, report, study
from neuclip_ds.reproduction.data import prepare
from neuclip_ds.reproduction.runner import MINIATURE, Runner, read_results


def methods(arguments: argparse.Namespace) -> None:
    """Compare every method, or print the tables of a study that has ended."""
    out: Path = arguments.out
    path = arguments.results or out / "results.jsonl"
    if arguments.results is None:
        _study(arguments)
    out.mkdir(parents=True, exist_ok=True)
    results = report.after_seed(read_results(path), arguments.after_seed)
    print(report.write(results, out, f"Miniature reproduction, {path}"))
    print(f"The report is {out}/report.html (report.md and plots are next to it); its runs are in {path}.")


def _study(arguments: argparse.Namespace) -> None:
    """Run what is asked for: search, finals, ablations and cost."""
    regimes = tuple(map(study.Regime.parse, arguments.regimes))
    arms = chosen(arguments.arms)
    recipe, towers = _start(arguments)
    runner = prepared(arguments, arguments.pairs, recipe)
    sizes = study.Study(arguments.seeds, arguments.anchors, towers, arguments.search_seeds)
    best = search(runner, {*map(study.nearest_search, regimes)}, set(map(study.searched, arms)), sizes)
    if "finals" in arguments.stages:
        run(runner, list(study.finals(regimes, arms, best, sizes)), "finals")
    if "ablations" in arguments.stages:
        searched = set(map(study.searched, study.ABLATIONS))
        best |= search(runner, {study.nearest_search(regimes[0])}, searched, sizes)
        run(runner, list(study.finals(regimes[:1], study.ABLATIONS, best, sizes)), "ablations")
    if "cost" in arguments.stages:
        out = arguments.out.resolve()
        alone = Runner(out / "data", out / "runs", None, processes=1, recipe=recipe)
        run(alone, study.cost(best, sizes), "cost")


def _start(arguments: argparse.Namespace) -> tuple[str, study.Options]:
    """Return the recipe of all runs, and the options of the weights that they start from."""
    if not arguments.packaged_towers:
        return MINIATURE, {"model.pretrained": str(arguments.pretrained)} if arguments.pretrained else {}
    if arguments.pretrained:
        raise UserError("--pretrained and --packaged-towers both name what runs start from; give one of them.")
    return packaged_towers.RECIPE, packaged_towers.find_towers(arguments.out / "towers")


def chosen(names: Sequence[str]) -> list[str]:
    """Return names of arms.

    Raises:
        UserError: one is unknown.
    """
    for name in names:
        if name not in study.KNOWN:
            raise UserError(f"Unknown arm {name}{nearest(name, study.KNOWN) or '.'} Arms: {'; '.join(study.KNOWN)}.")
    return list(names)


def search(
    runner: Runner, regimes: set[study.Regime], arms: set[str], sizes: study.Study
) -> dict[tuple[study.Regime, str], study.Point]:
    """Return the best point of every searched arm in every regime, searched in rounds of runs."""
    scores: dict[tuple[study.Regime, str], dict[study.Point, float]] = {
        (regime, arm): {} for regime in sorted(regimes) for arm in study.SEARCHES if arm in arms
    }
    while True:
        asked = {
            (regime, arm, point): study.search_jobs(arm, regime, point, sizes)
            for (regime, arm), known in scores.items()
            for point in study.next_points(known, study.SEARCHES[arm])
        }
        if not asked:
            return {which: max(known, key=lambda point: known[point]) for which, known in scores.items()}
        found = run(runner, list(itertools.chain(*asked.values())), "search")
        for (regime, arm, point), jobs in asked.items():
            scores[regime, arm][point] = statistics.mean(report.mean_recall(found[job.name]) for job in jobs)


def prepared(arguments: argparse.Namespace, pairs: int | None = None, recipe: str = MINIATURE) -> Runner:
    """Make the study's splits; the runner evaluates on the zero-shot set next to the source, if there is one."""
    demo, out = arguments.source.startswith("demo:"), arguments.out.resolve()
    source = Path(demo_split(arguments.source, Path(".cache"))) if demo else Path(arguments.source)
    side = parse([recipe]).config.model.vision.image_size * 5 // 4  # room for crops
    prepare(source, out / "data", validation=1000, test=2000, pairs=pairs, side=side)
    images = source.parent.resolve() / "zero_shot"
    return Runner(out / "data", out / "runs", images if images.is_dir() else None, arguments.processes, recipe)


def run(runner: Runner, jobs: list[study.Job], title: str) -> dict[str, dict[str, float]]:
    """Run jobs behind a progress bar; return results by job."""
    done = itertools.count(1)
    with progress_bar(title) as show:
        show(0, len(jobs))
        return runner.run(jobs, lambda: show(next(done), len(jobs)))
