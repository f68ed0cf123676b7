"""Tables and plots of a study, from the results of its runs: report.html, report.md and PNG files."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import matplotlib

from neuclip_ds.reporting.page import Table, write_page
from neuclip_ds.reproduction.study import ESTIMATORS, SEARCHES

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Results = Mapping[str, Mapping[str, float]]
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
    """Return the study's tables, in the order of the papers' claims."""
    finals = by_group(results, "final")
    ranked = sorted(finals, key=lambda name: -summarize(map(mean_recall, finals[name])).mean)
    quality = Table("Methods, held-out test pairs", ["method", "mean recall %", *_COLUMNS], [])
    for name in ranked:
        quality.rows.append([name, str(summarize(map(mean_recall, finals[name]))), *_cells(finals[name])])
    found = [quality, _chosen(results)]
    error = Table("Normaliser error (mean squared, log) as B shrinks and n shrinks", ["method", "B, n"], [])
    error.header.extend(["B/2", "B/4", "n/10"])
    batch, data = by_group(results, "batch"), by_group(results, "data")
    for name in ESTIMATORS:
        groups = [finals, batch, batch, data]
        keys = [name, f"{name}/B_over_2", f"{name}/B_over_4", f"{name}/n_over_10"]
        error.rows.append(
            [name, *(_cell(group.get(key, []), "normalizer_mse") for group, key in zip(groups, keys, strict=True))]
        )
    ablations = Table("Ablations", ["variant", "mean recall %", *_COLUMNS], [])
    for name, group in by_group(results, "ablation").items():
        ablations.rows.append([name, str(summarize(map(mean_recall, group))), *_cells(group)])
    cost = Table(
        "Time of a step, one run at a time, one process with one thread", ["method", "ms", "of openclip's"], []
    )
    costs = {name: summarize(r["step_ms"] for r in group) for name, group in by_group(results, "cost").items()}
    for name, summary in costs.items():
        cost.rows.append([name, str(summary), f"{summary.mean / costs['openclip'].mean:.2f}"])
    return [*found, error, ablations, cost]


_COLUMNS = {
    "image to text R@1 %": ("image_to_text_recall@1", 100),
    "text to image R@1 %": ("text_to_image_recall@1", 100),
    "zero-shot top-1 %": ("zero_shot_top1", 100),
    "normaliser MSE": ("normalizer_mse", 1),
}


def _cells(group: list[Mapping[str, float]]) -> list[str]:
    return [_cell(group, key, factor) for key, factor in _COLUMNS.values()]


def _cell(group: list[Mapping[str, float]], key: str, factor: float = 1) -> str:
    values = [factor * result[key] for result in group if key in result]
    return str(summarize(values)) if values else "-"


def _chosen(results: Results) -> Table:
    table = Table(
        "Search on the validation split (one seed)", ["method", "learning rate and value", "mean recall %"], []
    )
    for method, search in SEARCHES.items():
        for name, result in results.items():
            if name.startswith(f"search/{method}/"):
                place = name.rsplit("/", 1)[1].replace("_", f", {search.option.rsplit('.', 1)[1]} ")
                table.rows.append([method, place, f"{mean_recall(result):.2f}"])
    return table


def write(results: Results, folder: Path, heading: str) -> None:
    """report.html, report.md, quality.png and normalizer_error.png in `folder`."""
    write_page(
        tables(results), [_plot_quality(results, folder), _plot_error(results, folder)], folder / "report", heading
    )


def _plot_quality(results: Results, folder: Path) -> str:
    finals = by_group(results, "final")
    summaries = {name: summarize(map(mean_recall, group)) for name, group in finals.items()}
    names = sorted(summaries, key=lambda name: summaries[name].mean)
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(names) + 1.2), layout="constrained")
    axes.barh(names, [summaries[n].mean for n in names], xerr=[summaries[n].deviation for n in names], color="#4c72b0")
    axes.set_xlabel("mean recall on held-out test pairs, % (mean and deviation over seeds)")
    return save_figure(figure, folder, "quality.png")


def _plot_error(results: Results, folder: Path) -> str:
    finals, batch, data = (by_group(results, kind) for kind in ("final", "batch", "data"))
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for name in ESTIMATORS:
        whole = finals.get(name, [])
        by_batch = [(4, batch.get(f"{name}/B_over_4")), (2, batch.get(f"{name}/B_over_2")), (1, whole)]
        by_data = [(0.1, data.get(f"{name}/n_over_10")), (1, whole)]
        for axes, series in zip(panels, ([(1 / x, g) for x, g in by_batch], by_data), strict=True):
            points = [(x, summarize(r["normalizer_mse"] for r in g if "normalizer_mse" in r)) for x, g in series if g]
            axes.errorbar(
                [x for x, _ in points], [s.mean for _, s in points], [s.deviation for _, s in points], label=name
            )
    for axes, label in zip(panels, ("batch size / B", "data set size / n"), strict=True):
        axes.set(xlabel=label, xscale="log", yscale="log")
    panels[0].set_ylabel("normaliser MSE (log)")
    panels[0].legend()
    return save_figure(figure, folder, "normalizer_error.png")


def save_figure(figure: plt.Figure, folder: Path, name: str) -> str:
    """Writes FOLDER/NAME; the name."""
    figure.savefig(folder / name, dpi=120)
    plt.close(figure)
    return name
