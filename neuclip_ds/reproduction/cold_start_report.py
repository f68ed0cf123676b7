"""The cold-start study's tables and curves: tuneclip.md, tuneclip.html and tuneclip.png."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

from neuclip_ds.reporting.page import Table, write_page
from neuclip_ds.reproduction.cold_start import LEARNING_RATES, VARIANTS
from neuclip_ds.reproduction.report import Summary, by_group, mean_recall, save_figure, summarize
from neuclip_ds.reproduction.runner import Curve

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Curves = Mapping[str, Sequence[Curve]]  # variant -> its seeds'
_PLOTTED = [name for name, variant in VARIANTS.items() if variant.searched is None]
_SCORES = {"mean recall %": mean_recall, "zero-shot top-1 %": lambda point: 100 * point.get("zero_shot_top1", 0.0)}


def write(
    curves: Curves,
    searched: Mapping[str, Mapping[float, float]],
    recoveries: Sequence[Table],
    folder: Path,
    heading: str,
) -> None:
    """The study's page.

    Args:
        curves: evaluations by step.
        searched: variant -> learning rate -> mean recall on the validation split.
        recoveries: how the ways to recover differ.
        folder: where to write.
        heading: of the page.
    """
    search = Table("Search on the validation split (seed 0), mean recall %", ["variant"], [])
    search.header.extend(f"lr {lr:g}" for lr in LEARNING_RATES)
    for name, scores in searched.items():
        search.rows.append([name, *(f"{scores[lr]:.2f}" for lr in LEARNING_RATES)])
    write_page([*_quality(curves), search, *recoveries], [_plot(curves, folder)], folder / "tuneclip", heading)


def recoveries(results: Mapping[str, Mapping[str, float]]) -> Table:
    """Duration and error of every way to recover, over seeds; `recover/NAME/seedN` -> results."""
    groups = by_group(results, "recover")
    header = ["recovered", "seconds of the run", "log u, mean squared error against all pairs"]
    table = Table("Ways to recover", header, [])
    for name, group in groups.items():
        errors = [result["normalizer_mse"] for result in group if "normalizer_mse" in result]
        error = str(summarize(errors)) if errors and all(map(math.isfinite, errors)) else "-"
        table.rows.append([name, str(summarize(result["seconds"] for result in group)), error])
    return table


def differences(found: Sequence[Mapping[str, float]]) -> Table:
    """Of the cached recovery from the full one, over seeds."""
    rows = [[key, _in_three(summarize(row[key] for row in found))] for key in found[0]]
    return Table("Cached recovery against the full one", ["what", "mean and deviation over seeds"], rows)


def _in_three(summary: Summary) -> str:
    return f"{summary.mean:.3f} ± {summary.deviation:.3f}"


def _quality(curves: Curves) -> list[Table]:
    """Start, worst and last point of every variant, over seeds."""
    found = []
    for title, score in _SCORES.items():
        table = Table(f"Fine-tuning on other data, {title}", ["variant", "start", "lowest", "end", "end - start"], [])
        for name, runs in curves.items():
            series = [[score(point) for _, point in run] for run in runs]
            ends = [values[-1] for values in series]
            gains = [values[-1] - values[0] for values in series]
            columns = ([values[0] for values in series], [min(values) for values in series], ends, gains)
            table.rows.append([name, *(str(summarize(column)) for column in columns)])
        found.append(table)
    return found


def _plot(curves: Curves, folder: Path) -> str:
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, (title, score) in zip(panels, _SCORES.items(), strict=True):
        for name in _PLOTTED:
            steps = [step for step, _ in curves[name][0]]
            changes = [[score(point) - score(run[0][1]) for _, point in run] for run in curves[name]]
            summaries = [summarize(of_step) for of_step in zip(*changes, strict=True)]
            means, deviations = ([getattr(s, part) for s in summaries] for part in ("mean", "deviation"))
            (line,) = axes.plot(steps, means, label=name)
            low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
            axes.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set(xlabel="step of fine-tuning", ylabel=f"{title}, held out, change from the start")
    panels[0].legend(fontsize=8)
    return save_figure(figure, folder, "tuneclip.png")
