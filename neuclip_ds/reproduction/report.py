"""Tables and plots of a study, from the results of its runs: report.html, report.md and PNG files."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from neuclip_ds.reporting.page import Table, write_page
from neuclip_ds.reproduction.study import ESTIMATORS, SEARCHES

Results = Mapping[str, Mapping[str, float]]
Group = Sequence[Mapping[str, float]]  # of seeds
RECALLS = [f"{side}_recall@{k}" for side in ("image_to_text", "text_to_image") for k in (1, 5, 10)]


class Summary(NamedTuple):
    """A figure over seeds."""

    mean: float
    deviation: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if self.seeds > 1 else f"{self.mean:.2f}"


def mean_recall(result: Mapping[str, float]) -> float:
    """Mean of R@1, R@5 and R@10 in both directions, percent; 0 for a run that diverged."""
    return 100 * statistics.mean(result.get(name, 0.0) for name in RECALLS)


def summarize(values: Iterable[float]) -> Summary:
    """Mean and sample deviation."""
    known = list(values)
    return Summary(statistics.mean(known), statistics.stdev(known) if len(known) > 1 else 0.0, len(known))


def by_group(results: Results, kind: str) -> dict[str, list[Mapping[str, float]]]:
    """`KIND/GROUP/seedN` -> results of GROUP's seeds."""
    groups: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
    for name, result in results.items():
        match = re.fullmatch(rf"{kind}/(.+)/seed\d+", name)
        if match:
            groups[match[1]].append(result)
    return dict(groups)


def tables(results: Results) -> list[Table]:
    """Return what the study found, in the order of the papers' claims."""
    finals = by_group(results, "final")
    ranked = sorted(finals, key=lambda name: -summarize(map(mean_recall, finals[name])).mean)
    searched = [
        [
            method,
            name.rsplit("/", 1)[1].replace("_", f", {search.option.rsplit('.', 1)[1]} "),
            f"{mean_recall(one):.2f}",
        ]
        for method, search in SEARCHES.items()
        for name, one in results.items()
        if name.startswith(f"search/{method}/")
    ]
    errors = [[name, *(_cell(group, "normalizer_mse") for group in _sizes(results, name))] for name in ESTIMATORS]
    costs = {name: summarize(one["step_ms"] for one in group) for name, group in by_group(results, "cost").items()}
    times = [[name, str(cost), f"{cost.mean / costs['openclip'].mean:.2f}"] for name, cost in costs.items()]
    title = "Normaliser error (mean squared, log) as B shrinks and n shrinks"
    return [
        _quality("Methods, held-out test pairs", "method", {name: finals[name] for name in ranked}),
        Table(
            "Search on the validation split (one seed)",
            ["method", "learning rate and value", "mean recall %"],
            searched,
        ),
        Table(title, ["method", "B, n", "B/2", "B/4", "n/10"], errors),
        _quality("Ablations", "variant", by_group(results, "ablation")),
        Table(
            "Time of a step, one run at a time, one process with one thread", ["method", "ms", "of openclip's"], times
        ),
    ]


_COLUMNS = {
    "image to text R@1 %": ("image_to_text_recall@1", 100),
    "text to image R@1 %": ("text_to_image_recall@1", 100),
    "zero-shot top-1 %": ("zero_shot_top1", 100),
    "normaliser MSE": ("normalizer_mse", 1),
}


def _quality(title: str, kind: str, groups: Mapping[str, Group]) -> Table:
    rows = [
        [name, str(summarize(map(mean_recall, group))), *(_cell(group, *column) for column in _COLUMNS.values())]
        for name, group in groups.items()
    ]
    return Table(title, [kind, "mean recall %", *_COLUMNS], rows)


def _cell(group: Group, key: str, factor: float = 1) -> str:
    values = [factor * result[key] for result in group if key in result]
    return str(summarize(values)) if values else "-"


def _sizes(results: Results, name: str) -> list[Group]:
    """Return an estimator's runs with the whole batch and data, B/2, B/4 and n/10."""
    batch = by_group(results, "batch")
    smaller = [batch.get(f"{name}/B_over_{share}", []) for share in (2, 4)]
    return [by_group(results, "final").get(name, []), *smaller, by_group(results, "data").get(f"{name}/n_over_10", [])]


def write(results: Results, folder: Path, heading: str) -> None:
    """Write report.html, report.md, quality.png and normalizer_error.png into a folder."""
    figures = {"quality.png": _plot_quality(results), "normalizer_error.png": _plot_error(results)}
    write_page(tables(results), figures, folder / "report", heading)


def _plot_quality(results: Results) -> Figure:
    finals = by_group(results, "final")
    summaries = {name: summarize(map(mean_recall, group)) for name, group in finals.items()}
    names = sorted(summaries, key=lambda name: summaries[name].mean)
    figure = Figure(figsize=(7, 0.4 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [summaries[n].mean for n in names], xerr=[summaries[n].deviation for n in names], color="#4c72b0")
    axes.set_xlabel("mean recall on held-out test pairs, % (mean and deviation over seeds)")
    return figure


def _plot_error(results: Results) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for name in ESTIMATORS:
        whole, half, quarter, tenth = _sizes(results, name)
        batches, data = [(0.25, quarter), (0.5, half), (1, whole)], [(0.1, tenth), (1, whole)]
        for axes, series in zip(panels, (batches, data), strict=True):
            points = [(x, summarize(r["normalizer_mse"] for r in g if "normalizer_mse" in r)) for x, g in series if g]
            means, deviations = ([getattr(s, part) for _, s in points] for part in ("mean", "deviation"))
            axes.errorbar([x for x, _ in points], means, deviations, label=name)
    for axes, label in zip(panels, ("batch size / B", "data set size / n"), strict=True):
        axes.set(xlabel=label, xscale="log", yscale="log")
    panels[0].set_ylabel("normaliser MSE (log)")
    panels[0].legend()
    return figure
