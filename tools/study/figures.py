"""Figures of a study: gains over OpenCLIP by batch size, and curves over training. Requires matplotlib."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from study.tables import PEER, difference, grouped

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "study"  # equal records give equal files
import matplotlib.pyplot as plt  # noqa: E402, after the choice of the backend

CURVES = {
    "recall": "mean recall, %",
    "tau": "temperature tau",
    "kl": "KL(p_i, uniform), nats",
    "error_mean": "mean of log u - log g, nats",
}


def draw(records: Mapping[str, Any], stage: str, folder: Path) -> list[Path]:
    """Draw the runs of a stage; return the files written."""
    rows_by_batch = {}
    for (name, batch), rows in sorted(grouped(records).items()):
        if name == stage:
            rows_by_batch[batch] = rows
    arms = sorted({arm for rows in rows_by_batch.values() for arm in rows})
    color = dict(zip(arms, plt.get_cmap("tab20").colors, strict=False))
    most_arms = max(rows_by_batch.values(), key=len)
    figures = {"gains": _gains(rows_by_batch, color), "curves": _curves(most_arms, color)}
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures.items():
        file = folder / f"{stage}_{name}.svg"
        figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
        files.append(file)
    return files


def _gains(rows_by_batch: Mapping[int, Any], color: Mapping[str, Any]) -> plt.Figure:
    """Plot each arm's gain over OpenCLIP at the same batch size, with 95 % intervals."""
    figure, axes = plt.subplots(figsize=(7, 4))
    others = [arm for arm in color if arm != PEER]
    for number, arm in enumerate(others):
        batches = []
        gains = []
        half_widths = []
        for batch, rows in rows_by_batch.items():
            seeds = sorted(rows.get(arm, {}).keys() & rows[PEER].keys())
            if len(seeds) > 1:
                ours = [rows[arm][seed]["recall"] for seed in seeds]
                theirs = [rows[PEER][seed]["recall"] for seed in seeds]
                gain, half_width = difference(ours, theirs)
                batches.append(batch * 1.03**number)  # next to the other arms' points
                gains.append(gain)
                half_widths.append(half_width)
        if batches:
            axes.errorbar(batches, gains, half_widths, color=color[arm], label=arm, marker="o", capsize=2)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="batch size B", ylabel="mean recall minus OpenCLIP's, in points")
    axes.minorticks_off()
    axes.set_xticks(list(rows_by_batch), [str(batch) for batch in rows_by_batch])
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _curves(rows: Mapping[str, Any], color: Mapping[str, Any]) -> plt.Figure:
    """Plot the means over seeds of the values that runs record during training."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6), sharex=True)
    for axes, (key, label) in zip(panels.flat, CURVES.items(), strict=True):
        for arm, seeds in rows.items():
            curves = [results["curve"] for results in seeds.values()]
            if key not in curves[0][0]:
                continue
            steps = []
            means = []
            for records in zip(*curves, strict=True):  # of one step, by seed
                steps.append(records[0]["step"])
                means.append(statistics.mean(record[key] for record in records))
            axes.plot(steps, means, color=color[arm], label=arm)
        axes.set(ylabel=label, xlabel="step")
    figure.tight_layout()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
