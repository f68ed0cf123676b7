"""The cold-start study's tables and curves: tuneclip.md, tuneclip.html and tuneclip.png."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from neuclip_ds.reporting.page import Table, write_page
from neuclip_ds.reproduction.cold_start import LEARNING_RATES, VARIANTS
from neuclip_ds.reproduction.report import by_group, mean_recall, summarize
from neuclip_ds.reproduction.runner import Curve

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
    """Write the study's page: curves, the search's mean recall by learning rate, and how the ways to recover differ."""
    header = ["variant", *(f"lr {lr:g}" for lr in LEARNING_RATES)]
    rows = [[name, *(f"{scores[lr]:.2f}" for lr in LEARNING_RATES)] for name, scores in searched.items()]
    search = Table("Search on the validation split (seed 0), mean recall %", header, rows)
    figures = {"tuneclip.png": _plot(curves)}
    write_page([*_quality(curves), search, *recoveries], figures, folder / "tuneclip", heading)


def recoveries(results: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of duration and error of every way to recover, over seeds; `recover/NAME/seedN` -> results."""
    header = ["recovered", "seconds of the run", "log u, mean squared error against all pairs"]
    table = Table("Ways to recover", header, [])
    for name, group in by_group(results, "recover").items():
        errors = [result["normalizer_mse"] for result in group if "normalizer_mse" in result]
        error = str(summarize(errors)) if errors and all(map(math.isfinite, errors)) else "-"
        table.rows.append([name, str(summarize(result["seconds"] for result in group)), error])
    return table


def differences(found: Sequence[Mapping[str, float]]) -> Table:
    """Return the table of differences of the cached recovery from the full one, over seeds."""
    summaries = {key: summarize(row[key] for row in found) for key in found[0]}
    rows = [[key, f"{of.mean:.3f} ± {of.deviation:.3f}"] for key, of in summaries.items()]
    return Table("Cached recovery against the full one", ["what", "mean and deviation over seeds"], rows)


def _quality(curves: Curves) -> list[Table]:
    """Return the tables of start, worst and last point of every variant, over seeds."""
    found = []
    for title, score in _SCORES.items():
        table = Table(f"Fine-tuning on other data, {title}", ["variant", "start", "lowest", "end", "end - start"], [])
        for name, runs in curves.items():
            series = [[score(point) for _, point in run] for run in runs]
            points = [(values[0], min(values), values[-1], values[-1] - values[0]) for values in series]
            table.rows.append([name, *(str(summarize(column)) for column in zip(*points, strict=True))])
        found.append(table)
    return found


def _plot(curves: Curves) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (title, score) in zip(panels, _SCORES.items(), strict=True):
        for name in _PLOTTED:
            steps = [step for step, _ in curves[name][0]]
            changes = [[score(point) - score(run[0][1]) for _, point in run] for run in curves[name]]
            summaries = [summarize(of_step) for of_step in zip(*changes, strict=True)]
            low, mean, high = ([s.mean + sign * s.deviation for s in summaries] for sign in (-1, 0, 1))
            (line,) = axes.plot(steps, mean, label=name)
            axes.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set(xlabel="step of fine-tuning", ylabel=f"{title}, held out, change from the start")
    panels[0].legend(fontsize=8)
    return figure
