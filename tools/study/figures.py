"""Figures of a study: gains over OpenCLIP by batch size, and curves over the training. They need matplotlib."""

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
    groups = {batch: rows for (name, batch), rows in sorted(grouped(records).items()) if name == stage}
    arms = sorted({arm for rows in groups.values() for arm in rows})
    color = dict(zip(arms, plt.get_cmap("tab20").colors, strict=False))
    figures = {"gains": _gains(groups, color), "curves": _curves(max(groups.values(), key=len), color)}
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{stage}_{name}.svg" for name in figures]
    for file, figure in zip(files, figures.values(), strict=True):
        figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
    return files


def _gains(groups: Mapping[int, Any], color: Mapping[str, Any]) -> plt.Figure:
    """Plot each arm's gain over OpenCLIP at the same batch size, with 95 % intervals."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, arm in enumerate(arm for arm in color if arm != PEER):
        points = []
        for batch, rows in groups.items():
            seeds = sorted(rows.get(arm, {}).keys() & rows[PEER].keys())
            if len(seeds) > 1:
                pairs = ([rows[name][seed]["recall"] for seed in seeds] for name in (arm, PEER))
                points.append((batch * 1.03**number, *difference(*pairs)))
        if points:
            axes.errorbar(*zip(*points, strict=True), color=color[arm], label=arm, marker="o", capsize=2)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="batch size B", ylabel="mean recall minus OpenCLIP, points")
    axes.minorticks_off()
    axes.set_xticks(list(groups), [str(batch) for batch in groups])
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _curves(rows: Mapping[str, Any], color: Mapping[str, Any]) -> plt.Figure:
    """Plot means over seeds of what a run records as it trains."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6), sharex=True)
    for axes, (key, label) in zip(panels.flat, CURVES.items(), strict=True):
        for arm, seeds in rows.items():
            records = list(zip(*(one["curve"] for one in seeds.values()), strict=True))
            if key in records[0][0]:
                means = [statistics.mean(one[key] for one in each) for each in records]
                axes.plot([each[0]["step"] for each in records], means, color=color[arm], label=arm)
        axes.set(ylabel=label, xlabel="step")
    figure.tight_layout()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
