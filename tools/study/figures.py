"""Figures of a study: gains over OpenCLIP by batch size, and curves over training. Requires matplotlib."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from neuclip_ds.errors import UserError
from study.tables import difference, grouped, peer_of

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
    """Draw the curves of a stage's runs and, for arms that share at least two seeds with OpenCLIP, the gains over it.

    The curves are those of the batch size with the most settings. Returns the paths of the files.

    Raises:
        UserError: the stage has no records, or more settings than there are colors.
    """
    rows_by_batch = {}
    for (name, batch), rows in sorted(grouped(records).items()):
        if name == stage:
            rows_by_batch[batch] = rows
    if not rows_by_batch:
        raise UserError(f"There are no records of the stage {stage} to draw; pass another one first in --stages.")
    arms = sorted({arm for rows in rows_by_batch.values() for arm in rows})
    colors = plt.get_cmap("tab20").colors
    if len(arms) > len(colors):
        raise UserError(
            f"The stage {stage} has {len(arms)} settings, and a figure shows at most {len(colors)}; pass another stage "
            "first in --stages."
        )
    color = dict(zip(arms, colors, strict=False))
    most_arms = max(rows_by_batch.values(), key=len)
    figures = {"curves": _curves(most_arms, color)}
    compared: list[str] = []
    for arm in arms:
        if any(len(_paired_recalls(arm, rows)[0]) > 1 for rows in rows_by_batch.values()):
            compared.append(arm)
    if compared:
        figures["gains"] = _gains(rows_by_batch, compared, color)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures.items():
        file = folder / f"{stage}_{name}.svg"
        figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
        files.append(file)
    return files


def _paired_recalls(arm: str, rows: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return the recalls of an arm and of OpenCLIP on the seeds that both have; there are none without OpenCLIP."""
    peer = peer_of(arm, rows)
    if arm not in rows or peer is None:
        return [], []
    seeds = sorted(rows[arm].keys() & rows[peer].keys())
    ours = [rows[arm][seed]["recall"] for seed in seeds]
    theirs = [rows[peer][seed]["recall"] for seed in seeds]
    return ours, theirs


def _gains(rows_by_batch: Mapping[int, Any], compared: Sequence[str], color: Mapping[str, Any]) -> plt.Figure:
    """Plot each arm's gain over OpenCLIP at the same batch size, with 95% intervals."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, arm in enumerate(compared):
        batches = []
        gains = []
        half_widths = []
        for batch, rows in rows_by_batch.items():
            ours, theirs = _paired_recalls(arm, rows)
            if len(ours) > 1:
                gain, half_width = difference(ours, theirs)
                batches.append(batch * 1.03**number)  # next to the other arms' points
                gains.append(gain)
                half_widths.append(half_width)
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
    # all runs record tau
    figure.legend(*panels[0, 1].get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
