"""Compare methods with the same data, small towers, budget and search of rates, over paired seeds, on two CPU cores.

Each arm (a method or a variant of it; tools/reproduction/arms.yaml lists them) trains in each regime (batch size and
epochs) from the same seeds, at the learning rate that a search on validation pairs has found for it, and is judged on
test pairs. OUT receives report.md: mean recall, and the difference to OpenCLIP with its 95 % interval. The same command
resumes a study that was interrupted: OUT/results.jsonl has a line for each run that ended.

Examples:
  python tools/reproduce.py demo:train --regimes 32x3 --arms openclip neuclip neuclip_queue --out runs/comparison
  python tools/reproduce.py --results docs/reference/reproduction.jsonl --out runs/report
  python tools/reproduce.py ../shared/data/flickr8k/train --packaged-towers --regimes 32x3 --out runs/flickr \\
    --arms openclip "neuclip, at OpenCLIP's rate and start" "neuclip_queue, at OpenCLIP's rate and start"
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from reproduction import packaged_towers, study
from reproduction.data import prepare
from reproduction.report import mean_recall, report
from reproduction.runner import MINIATURE, Results, Runner, read_results
from reproduction.study import ARMS, Job, Point, Regime, Study

from neuclip_ds.cli.program import Parser, exit_on_mistake, progress_bar
from neuclip_ds.data.demo import demo_split
from neuclip_ds.recipe import parse

BY_DEFAULT = ["openclip", "fastclip_v3", "amorlip", "neuclip", "neuclip_queue", "siglip"]


def main() -> None:
    parser = Parser(prog="reproduce.py", description=__doc__)
    parser.add_argument("source", nargs="?", default="demo:train", help="folder of img2dataset shards, or demo:train")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduction"), help="folder for data, runs and report")
    parser.add_argument("--regimes", nargs="+", default=["32x3", "128x12"], help="BATCHxEPOCHS, /10 for n/10 pairs")
    parser.add_argument("--arms", nargs="+", default=BY_DEFAULT, help="what to compare")
    parser.add_argument("--pairs", type=int, default=8000, help="training pairs n")
    packaged = "for photographs: start from EfficientNet-Lite0 and MiniLM, which Python packages ship"
    parser.add_argument("--packaged-towers", action="store_true", help=packaged)
    parser.add_argument("--results", type=Path, help="print the tables of a results.jsonl instead of running a study")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each arm, the same for all")
    parser.add_argument("--search-seeds", type=int, default=1, help="seeds of each point of a search")
    parser.add_argument("--anchors", type=int, default=1000, help="anchors for the error of the normalizer")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    with exit_on_mistake():
        asked = parser.parse(sys.argv[1:])
        if asked.results is None:
            compare(asked)
        results = read_results(asked.results or asked.out / "results.jsonl")
        text = report(results)
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "report.md").write_text(text, encoding="utf-8")
        print(f"{text}\nWritten: {asked.out}/report.md")


def compare(asked: argparse.Namespace) -> None:
    """Search the rates that the arms need, and run them."""
    regimes, arms = [Regime.parse(text) for text in asked.regimes], study.chosen(asked.arms)
    out = asked.out.resolve()
    recipe, towers = MINIATURE, {}
    if asked.packaged_towers:
        recipe, towers = packaged_towers.RECIPE, packaged_towers.find_towers(out / "towers")
    is_demo = asked.source.startswith("demo:")
    source = Path(demo_split(asked.source, Path(".cache"))) if is_demo else Path(asked.source)
    side = parse([recipe]).config.model.vision.image_size * 5 // 4  # room for crops
    prepare(source, out / "data", validation=1000, test=2000, pairs=asked.pairs, side=side)
    images = source.parent.resolve() / "zero_shot"
    runner = Runner(out / "data", out / "runs", images if images.is_dir() else None, asked.processes, recipe)
    sizes = Study(asked.seeds, asked.anchors, towers, asked.search_seeds)
    best = search(runner, {*map(study.nearest_search, regimes)}, {ARMS[arm].like for arm in arms}, sizes)
    run(runner, list(study.finals(regimes, arms, best, sizes)), "finals")


def search(runner: Runner, regimes: set[Regime], arms: set[str], sizes: Study) -> dict[tuple[Regime, str], Point]:
    """Return the best point of every arm in every regime, searched in rounds of runs."""
    scores: dict[tuple[Regime, str], dict[Point, float]] = {
        (regime, arm): {} for regime in sorted(regimes) for arm in sorted(arms)
    }
    while True:
        asked = {
            (regime, arm, point): study.search_jobs(arm, regime, point, sizes)
            for (regime, arm), known in scores.items()
            if (how := ARMS[arm].search) is not None
            for point in study.next_points(known, how)
        }
        if not asked:
            return {which: max(known, key=lambda point: known[point]) for which, known in scores.items()}
        found = run(runner, list(itertools.chain(*asked.values())), "search")
        for (regime, arm, point), jobs in asked.items():
            scores[regime, arm][point] = statistics.mean(mean_recall(found[job.name]) for job in jobs)


def run(runner: Runner, jobs: Sequence[Job], title: str) -> dict[str, Results]:
    """Run jobs behind a progress bar; return results by job."""
    done = itertools.count(1)
    with progress_bar(title) as show:
        show(0, len(jobs))
        return runner.run(jobs, lambda: show(next(done), len(jobs)))


if __name__ == "__main__":
    main()
